"""A hybrid that no paper has: pooling, convolution, matrix memory, attention. Trained for a moment, exported, run.

python examples/hybrid_to_onnx.py --out hybrid.onnx
"""

import argparse
import tempfile
from pathlib import Path

import torch

import mixlab
from mixlab.deploy.export import export, open_export


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="default: a temporary file")
    parser.add_argument("--epochs", type=int, default=8)
    asked = parser.parse_args()
    mixers = ["pool", "sepconv", "mlstm", {"name": "attention", "head_dim": 16}]
    with tempfile.TemporaryDirectory() as folder:
        run = mixlab.train(
            "caformer_pico",
            "digits",
            out=Path(folder, "run"),
            recipe="digits",
            changes={"schedule.epochs": asked.epochs, "schedule.warmup_epochs": 1},
            options={"mixers": mixers},
            workers=0,
            tensorboard=False,
        )
        target = asked.out or Path(folder, "hybrid.onnx")
        written = export(run.folder / "final.safetensors", target, data="digits")
        print(f"{target.name}: {written.bytes / 1e6:.1f} MB, largest difference {written.difference:.1e}")
        print(f"top-1 {written.top1:.1f}% in PyTorch, {written.exported_top1:.1f}% in ONNX Runtime")
        images = torch.randn(3, run.model.config.in_channels, *written.image_size)
        print(open_export(target).run(images).argmax(1).tolist(), run.model.eval()(images).argmax(1).tolist())


if __name__ == "__main__":
    main()
