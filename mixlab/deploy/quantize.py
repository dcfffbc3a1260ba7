"""int8 weights for ONNX files: products with constant matrices and LSTMs in whole numbers, scaled as they run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mixlab.core.errors import ExportError
from mixlab.deploy.graph import quietly
from mixlab.deploy.onnx import METADATA_KEY

OPERATORS = ("MatMul", "LSTM")  # convolutions in whole numbers are slower than in float32 and lose more
WHOLE = ("MatMulInteger", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM")


def quantize_onnx(source: Path, target: Path, about: Mapping[str, Any]) -> int:
    """Write `source` with int8 weights to `target`; the number of operators that became whole-numbered."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic  # type: ignore[import-untyped]
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata  # type: ignore[import-untyped]

    model = onnx.load(str(source))
    del model.graph.value_info[:]  # shapes between operators, which the changed graph contradicts
    add_pre_process_metadata(model)  # the exporter has optimised the graph already
    with quietly():
        quantize_dynamic(
            model,
            str(target),
            op_types_to_quantize=list(OPERATORS),
            nodes_to_exclude=batched_products(model),
            per_channel=True,
            weight_type=QuantType.QInt8,
        )
    written = onnx.load(str(target), load_external_data=False)
    count = sum(node.op_type in WHOLE for node in written.graph.node)
    if not count:
        raise ExportError("Nothing in this model can be quantized: it has no product with a constant matrix.")
    onnx.helper.set_model_props(written, {METADATA_KEY: json.dumps(about)})
    target.write_bytes(written.SerializeToString())
    return count


def batched_products(model: Any) -> list[str]:
    """Products with a constant stack of matrices, such as mLSTM's block-diagonal ones: onnxruntime has none in int8."""
    ranks = {constant.name: len(constant.dims) for constant in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    return [node.name for node in products if any(ranks.get(name, 0) > 2 for name in node.input)]
