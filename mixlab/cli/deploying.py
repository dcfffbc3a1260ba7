"""`mixlab export` and `mixlab optimize`."""

import json
from typing import TYPE_CHECKING, Literal

from jsonargparse import ArgumentParser, Namespace

from mixlab.cli.arguments import need
from mixlab.cli.printing import parse_size
from mixlab.cli.progress import status
from mixlab.core.errors import ConfigError

if TYPE_CHECKING:
    from mixlab.deploy.export import ExportResult


def export_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="A model as a file for other programs, run and compared with PyTorch before it is written. "
        "Example: mixlab export runs/mine/final.safetensors --out model.onnx"
    )
    parser.add_argument("model", help="a weight file, a model's name, NAME=WEIGHTS, or timm:NAME")
    parser.add_argument("--format", default="onnx", help="onnx, torch_export, or aot (compiled; needs a C++ compiler)")
    parser.add_argument("--out", default=None, help="the file: .onnx, or .pt2 for torch_export and aot")
    parser.add_argument("--image-size", default=None, help="N or HxW, the only size it takes; default: the model's own")
    parser.add_argument("--batch", default="dynamic", help="dynamic, or the only number of images it takes")
    parser.add_argument("--quantize", "--quantise", default=None, help="int8: weights as 8-bit numbers (onnx only)")
    parser.add_argument("--data", default=None, help="measure the top-1 accuracy before and after on this data")
    parser.add_argument("--split", default="val", choices=["train", "val", "test"], help="of the data")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser


def export(arguments: Namespace) -> None:
    """Write a model as ONNX, torch.export or compiled code."""
    need(arguments, "out")
    size = None if arguments.image_size is None else parse_size(str(arguments.image_size))
    batch = parse_batch(str(arguments.batch))
    from mixlab.deploy.export import export as run

    names = ("format", "quantize", "data", "split", "force")
    with status("opening the model") as say:
        result = run(
            arguments.model,
            arguments.out,
            image_size=size,
            batch=batch,
            say=say,
            **{name: arguments[name] for name in names},
        )
    print(json.dumps(result.plain(), indent=1) if arguments.json else told(result))


def optimize_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="How fast a model can be made for inference on this machine: folded, packed, compiled, measured "
        "and compared with the original. With --out the compiled model becomes a file that loads without compiling "
        "again. Example: mixlab optimize runs/mine/final.safetensors --batch 8 --out model.pt2"
    )
    parser.add_argument("model", help="a weight file, a model's name, or NAME=WEIGHTS")
    parser.add_argument("--batch", type=int, default=8, help="images at a time that it is measured with")
    parser.add_argument("--image-size", default=None, help="N or HxW; default: the model's own")
    parser.add_argument("--threads", type=int, default=None, help="of PyTorch; default: as many as it takes itself")
    parser.add_argument("--compile", default="auto", choices=["auto", "never", "always"], help="auto: if it is faster")
    parser.add_argument("--out", default=None, help="a .pt2 file for this kind of processor, any number of images")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser


def optimize(arguments: Namespace) -> None:
    """Make a model fast for inference here, and tell what it brought."""
    size = None if arguments.image_size is None else parse_size(str(arguments.image_size))
    from mixlab.deploy.optimize import optimize_file

    with status("opening the model") as say:
        found = optimize_file(
            arguments.model,
            arguments.out,
            image_size=size,
            batch=arguments.batch,
            threads=arguments.threads,
            compile={"auto": None, "never": False, "always": True}[arguments.compile],
            force=arguments.force,
            say=say,
        )
    if arguments.json:
        print(json.dumps(found.plain(), indent=1))
        return
    print(found.report)
    if found.file is not None:
        print(told(found.file))
        print(f"on that batch the file is {found.file_gain:.2f} times as fast as the original")


def parse_batch(text: str) -> int | Literal["dynamic"]:
    if text != "dynamic" and not text.isdecimal():
        raise ConfigError(f"--batch takes 'dynamic' or a number of images; got {text!r}.")
    return "dynamic" if text == "dynamic" else int(text)


def told(result: "ExportResult") -> str:
    """The result in words."""
    height, width = result.image_size
    taken = "any number of images" if result.batch is None else f"{result.batch} images at once"
    lines = [
        f"{result.path}: {result.format}, {result.bytes / 1e6:.1f} MB, {taken} of {height} x {width} px, "
        f"written in {result.seconds:.0f} s",
        f"largest difference from PyTorch {result.difference:.2g} (scores up to {result.scale:.3g})",
    ]
    if not result.scale:
        lines.append("every score is 0, as those of a fresh classifier can be: the comparison says nothing")
    if result.quantized is not None:
        lines.append(f"largest difference with {result.quantized} weights {result.quantized_difference:.2g}")
    if result.top1 is not None and result.exported_top1 is not None:
        lost = result.exported_top1 - result.top1
        lines.append(f"top-1 {result.top1:.2f}% in PyTorch, {result.exported_top1:.2f}% in the file ({lost:+.2f})")
    if not result.trained:
        lines.append("the weights are fresh: this file recognises nothing")
    return "\n".join(lines)
