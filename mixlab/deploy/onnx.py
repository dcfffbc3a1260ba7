"""ONNX files: written from a traced graph with what a consumer must know inside, and run by onnxruntime."""

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mixlab.core.errors import ExportError
from mixlab.deploy.graph import Program, first_lines, quietly
from mixlab.deploy.recurrence import traced_by_shape

OPSET = 20
INPUT, OUTPUT = "images", "scores"
METADATA_KEY = "mixlab"
Run = Callable[[Tensor], Tensor]


def write_onnx(program: Program, path: Path, about: Mapping[str, Any]) -> None:
    """The graph as a file; parameters beyond what one file can hold (2 GB) go to `<name>.data` beside it."""
    try:
        with torch.no_grad(), quietly(), traced_by_shape("lstm", "gru", "rnn"):
            converted = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=[OUTPUT],
                custom_translation_table={torch.ops.aten.rnn_tanh.input: rnn_tanh},
                verbose=False,
            )
    except Exception as error:  # an operator that ONNX does not have, or a fault of the converter
        raise ExportError(f"The graph cannot be written as ONNX: {cause_of(error)}") from error
    assert converted is not None
    name_batch(converted.model)
    converted.model.metadata_props[METADATA_KEY] = json.dumps(about)
    converted.save(str(path))


def rnn_tanh(
    x: Any,
    state: Any,
    parameters: Any,
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, Any]:
    """The recurrent layer with tanh as one operator: PyTorch's converter knows LSTM and GRU only. One layer, biases."""
    from onnxscript import opset20

    op: Any = opset20  # its types do not know that lists become constants
    assert biases
    assert layers == 1
    both = [parameters[start : start + 4] for start in range(0, len(parameters), 4)]  # of each direction
    w_x, w_h, b_x, b_h = (
        op.Concat(*(op.Unsqueeze(direction[index], [0]) for direction in both), axis=0) for index in range(4)
    )
    out, last = op.RNN(
        op.Transpose(x, perm=[1, 0, 2]) if batch_first else x,  # (T, N, C)
        w_x,
        w_h,
        op.Concat(b_x, b_h, axis=1),
        None,
        state,
        activations=["Tanh"] * len(both),
        direction="bidirectional" if bidirectional else "forward",
        hidden_size=both[0][1].shape[1],
    )
    out = op.Transpose(out, perm=[2, 0, 1, 3] if batch_first else [0, 2, 1, 3])  # from (T, directions, N, D)
    return op.Reshape(out, [0, 0, -1]), last


def cause_of(error: Exception) -> str:
    """What went wrong first: the converter wraps it several times, in advice for its own authors."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return first_lines(error)


def name_batch(model: Any) -> None:
    """Call the open axis `batch`: the tracer has a number for it."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is not None and not isinstance(value.shape[0], int):
            value.shape[0] = "batch"


def session(path: str | PathLike[str], threads: int | None = None) -> Any:
    """An onnxruntime session on the CPU, by default with as many threads as torch uses."""
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
    options.log_severity_level = 3  # errors only
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_onnx(path: str | PathLike[str]) -> Run:
    """Images (B, C, H, W) in, scores out, both as tensors."""
    opened = session(path)
    return lambda images: torch.from_numpy(opened.run([OUTPUT], {INPUT: images.numpy()})[0])


def about_onnx(path: str | PathLike[str]) -> dict[str, Any]:
    """What `write_onnx` was told about the model; empty for files of other programs."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    told = {entry.key: entry.value for entry in model.metadata_props}
    return json.loads(told[METADATA_KEY]) if METADATA_KEY in told else {}
