"""Models as files for other programs: ONNX, torch.export, or compiled; each is run and compared before it is kept."""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from mixlab.core.errors import ConfigError, ExportError, near_misses
from mixlab.deploy.checking import Accuracy, compare, images_for
from mixlab.deploy.graph import TRACED, trace
from mixlab.deploy.onnx import Run
from mixlab.deploy.quantize import quantize_onnx
from mixlab.deploy.specimen import Size, Source, Specimen, open_specimen
from mixlab.deploy.targets import AnyPath, Target, target_of, target_of_file

BOUND = 1e-4  # of the largest score, by which no score may differ
FLOOR = 1e-2  # scores below it are measured against it
QUANTIZED = ("int8",)
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What was written. Differences are the largest of any score from PyTorch's on random images.

    `difference` is that of the float32 graph, `quantized_difference` that of the file if it is quantized; `scale` is
    the largest score. The top-1 accuracies, in percent, are PyTorch's and the file's on `data`.
    """

    path: Path
    format: str
    image_size: tuple[int, int]
    batch: int | None  # None: dynamic
    difference: float
    scale: float
    seconds: float  # for everything
    bytes: int
    trained: bool  # False: the weights are fresh
    quantized: str | None = None
    quantized_difference: float | None = None
    top1: float | None = None
    exported_top1: float | None = None

    def plain(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "path": str(self.path), "image_size": list(self.image_size)}


@dataclass(frozen=True)
class Exported:
    """A file that `export` wrote: `run` takes normalised images (B, C, H, W) and gives scores; `about` tells how to
    prepare images.
    """

    run: Run
    about: dict[str, Any]


def export(
    model: Source,
    path: AnyPath,
    format: str = "onnx",
    *,
    image_size: Size | None = None,
    batch: int | Literal["dynamic"] = "dynamic",
    quantize: str | None = None,
    data: str | PathLike[str] | None = None,
    split: str = "val",
    force: bool = False,
    say: Say | None = None,
    quantise: str | None = None,
) -> ExportResult:
    """Write a classifier or a segmenter, by name, file or as it is, for one image size.

    The file is run and compared with PyTorch on batches that it was not traced with; if a score differs by more than
    1e-4 of the largest, nothing is written. `quantize="int8"` (ONNX only) stores the weights of linear layers and LSTMs
    as 8-bit numbers, and scores then differ as much as they do. `data` measures the top-1 accuracy of both.
    `quantise` is the older spelling of `quantize`.
    """
    start, say = time.monotonic(), say or (lambda text: None)
    target, size_of_batch = target_of(format), parse_batch(batch)
    quantize = quantize or quantise
    check_quantize(quantize, target)
    with place_for(path, target.suffix, force=force) as work:
        target.check()
        specimen = open_specimen(model, image_size)
        accuracy = None if data is None else Accuracy.on(specimen, data, split, size_of_batch)
        written = write(specimen, target, work, size_of_batch, say)
        found: dict[str, Any] = {}
        if quantize is not None:
            say("quantizing to int8")
            found |= {"quantized": quantize, "quantized_difference": write_int8(specimen, target, work, size_of_batch)}
        if accuracy is not None:
            say("measuring accuracy")
            found |= {"top1": accuracy.of_model(), "exported_top1": accuracy.of_file(target.run(work))}
        total = put_in_place(work, Path(path))
    return ExportResult(
        path=Path(path),
        format=format,
        image_size=specimen.image_size,
        batch=size_of_batch,
        difference=written[0],
        scale=written[1],
        seconds=time.monotonic() - start,
        bytes=total,
        trained=specimen.trained,
        **found,
    )


def open_export(path: AnyPath) -> Exported:
    """Run a file that `export` wrote. A .pt2 file holds code for PyTorch: open only what you trust."""
    target = target_of_file(path)
    target.check()
    try:
        return Exported(target.run(path), target.about(path))
    except Exception as error:  # a broken file, in the words of whichever library reads it
        raise ExportError(f"{path} cannot be opened as {target.name}: {error}") from error


# -- before the work -----------------------------------------------------------------------------


def parse_batch(batch: int | str) -> int | None:
    """None for "dynamic"."""
    if batch == "dynamic":
        return None
    if not isinstance(batch, int) or batch < 1:
        raise ConfigError(f"The batch is 'dynamic' or a number of images of 1 or more; got {batch!r}.")
    return batch


def check_quantize(quantize: str | None, target: Target) -> None:
    if quantize is None:
        return
    if quantize not in QUANTIZED:
        raise ConfigError(f"Unknown quantization {quantize!r}. {near_misses(quantize, QUANTIZED)}")
    if target.name != "onnx":
        raise ConfigError(
            f"Quantisation is for the format onnx, not for {target.name}: PyTorch's graphs cannot hold it."
        )


@contextmanager
def place_for(path: AnyPath, suffix: str, *, force: bool) -> Iterator[Path]:
    """A file of the final name in a folder beside it that exists for as long as the work takes."""
    final = Path(path)
    if final.suffix != suffix:
        raise ConfigError(f"The file for this format must end in {suffix}; got {str(path)!r}.")
    if final.is_dir():
        raise ConfigError(f"Cannot write {final}: it is a folder.")
    if final.exists() and not force:
        raise ConfigError(f"{final} exists. Choose another name, or overwrite it with --force (force=True).")
    try:
        folder = tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{final.name}.")
    except OSError as error:
        raise ConfigError(f"Cannot write into {final.parent}: {error.strerror or error}.") from error
    with folder as name:
        yield Path(name) / final.name


def put_in_place(work: Path, final: Path) -> int:
    """Move the file, and any with the parameters of a very large model, to the final place; their bytes."""
    files = sorted(work.parent.iterdir(), key=lambda file: file.name == work.name)  # the named one comes last
    total = sum(file.stat().st_size for file in files)
    for file in files:
        try:
            os.replace(file, final.with_name(file.name))
        except OSError as error:
            raise ExportError(f"Cannot write {final}: {error.strerror or error}.") from error
    return total


# -- the work ------------------------------------------------------------------------------------


def write_int8(specimen: Specimen, target: Target, work: Path, batch: int | None) -> float:
    """The file with whole-numbered weights in place of the float32 one; how far its scores are from PyTorch's."""
    plain = work.with_name(f"float_{work.name}")
    work.rename(plain)
    before = list(work.parent.iterdir())  # a very large model has its parameters beside it
    quantize_onnx(plain, work, {**specimen.about(batch), "quantized": "int8"})
    for file in before:
        file.unlink()
    apart, scale = compare(specimen, target.run(work), batch)
    if not math.isfinite(apart):
        raise ExportError(
            f"With int8 weights the scores of {specimen.name!r} are no numbers any more (they were up to {scale:.4g}). "
            f"Nothing was written; leave out --quantize."
        )
    return apart


def write(specimen: Specimen, target: Target, work: Path, batch: int | None, say: Say) -> tuple[float, float]:
    """The file, and how far its scores are from PyTorch's: the largest difference and the largest score."""
    say(f"tracing {specimen.name} at {specimen.image_size[0]} x {specimen.image_size[1]} px")
    program = trace(specimen.model, images_for(specimen, batch or TRACED, seed=0), dynamic=batch is None)
    say(f"{'compiling' if target.compiles else 'writing'} {target.name}")
    try:
        target.write(program, work, specimen.about(batch))
    except OSError as error:
        raise ExportError(f"Cannot write {work.name}: {error.strerror or error}.") from error
    say("comparing with PyTorch")
    apart, scale = compare(specimen, target.run(work), batch)
    if not apart <= BOUND * max(scale, FLOOR):  # not a number is no agreement either
        raise ExportError(
            f"The exported {specimen.name!r} computes something else: scores of up to {scale:.4g} differ by up to "
            f"{apart:.3g}, and {BOUND * max(scale, FLOOR):.1g} is allowed. Nothing was written."
        )
    return apart, scale
