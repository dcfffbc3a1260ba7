"""A model made fast for inference on this machine: folded, packed, perhaps compiled; measured, and compared."""

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mixlab.backbone import Backbone
from mixlab.config import ModelConfig
from mixlab.deploy.checking import images_for
from mixlab.deploy.compile import compile_blocks, has_compiler
from mixlab.deploy.export import ExportResult, export, open_export
from mixlab.deploy.folding import fold, linear_layers, pack
from mixlab.deploy.specimen import Size, Source, open_specimen
from mixlab.deploy.targets import AnyPath
from mixlab.errors import CompileError, ConfigError, require
from mixlab.evals.bench import threads_set
from mixlab.evals.execution import wait_for
from mixlab.evals.speed import alternate

BOUND = 1e-4  # of the largest score, by which no score may differ
ROUNDS = 5
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class OptimizeReport:
    """What was done and what it brought, on a batch like the example.

    `milliseconds` of the best run of the original and of every form that was tried; `chosen` is the fastest of these.
    `difference` is the largest of any score from the original's, `scale` the largest score.
    """

    steps: tuple[str, ...]
    milliseconds: Mapping[str, float]
    chosen: str
    gain: float
    difference: float
    scale: float
    compile_seconds: float | None
    batch: int
    image_size: tuple[int, int]
    threads: int

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "steps": list(self.steps), "image_size": list(self.image_size)}

    def __str__(self) -> str:
        height, width = self.image_size
        tried = ", ".join(f"{name} {value:.1f} ms" for name, value in self.milliseconds.items())
        return "\n".join(
            [
                *(f"- {step}" for step in self.steps),
                f"batch {self.batch} of {height} x {width} px, {self.threads} threads: {tried}",
                f"chosen: {self.chosen}, {self.gain:.2f} times as fast; "
                f"scores differ by {self.difference:.1e} at most (the largest is {self.scale:.3g})",
            ]
        )


class Optimized(nn.Module):
    """A model for inference. It takes images of any size and number, and was measured for those of its report.

    Nothing of it is trained or saved: keep the original for that.
    """

    def __init__(self, model: Backbone, report: OptimizeReport | None = None) -> None:
        super().__init__()
        self.model = model
        self.report = report
        self.eval()

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.model.class_names

    def forward(self, image: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
            scores: Tensor = self.model(image)
        return scores

    def embed(self, image: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
            return self.model.embed(image)

    def train(self, mode: bool = True) -> "Optimized":
        if mode:
            raise ConfigError("An optimised model is for inference. Train the original, and optimise it again.")
        return super().train(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Optimized":
        """Packed weights are constants that cannot be copied: both have them."""
        memo |= {id(layer.weight): layer.weight for layer in linear_layers(self.model) if layer.weight.is_mkldnn}
        twin = Optimized.__new__(Optimized)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def state_dict(self, *arguments: Any, **words: Any) -> Any:
        raise ConfigError("The weights of an optimised model are folded and packed. Save the original's.")


def optimize(
    model: Backbone, example: Tensor, *, compile: bool | None = None, bound: float = BOUND, say: Say | None = None
) -> Optimized:
    """A copy of a model for fast inference on batches like the example; the model itself is left alone.

    Factors are folded into linear layers, weights are packed as oneDNN wants them (float32 on a CPU), and the blocks
    are compiled where there is a compiler, identical ones sharing a graph: the fastest of these forms by measurement
    is what comes back. `compile` False leaves that out, True insists on it. A form whose scores differ by more than
    `bound` of the largest score is not taken. What was done, and the gain, is in `report`.
    """
    check(model, example, compile, bound)
    tell = say or (lambda _: None)
    original = copy.deepcopy(model).eval().requires_grad_(False)
    expected = scores_of(original, example)
    tell("folding")
    folded = copy.deepcopy(original)
    steps = fold(folded)
    forms: dict[str, Backbone] = {}
    eager = copy.deepcopy(folded)
    if count := pack(eager):
        steps.append(f"weights of {count} linear layers packed once for all calls")
    forms["eager"] = eager
    compile_seconds = None
    if compile or (compile is None and can_compile(example)):
        tell("compiling")
        start = time.perf_counter()
        forms["compiled"] = compile_blocks(folded)
        scores_of(folded, example)
        compile_seconds = time.perf_counter() - start
        steps.append(f"blocks compiled in {compile_seconds:.0f} s")
    apart = {name: float((scores_of(form, example) - expected).abs().max()) for name, form in forms.items()}
    scale = float(expected.abs().max())
    for name, difference in apart.items():
        if not difference <= bound * max(scale, bound):
            steps.append(f"{name} form not taken: scores differ by {difference:.1e}")
            del forms[name]
    if compile:
        forms = {name: form for name, form in forms.items() if name == "compiled"}
    if not forms:
        raise CompileError(f"No optimised form computes what the model computes within {bound:g} of its scores.")
    tell("measuring")
    runs = {name: runner(form, example) for name, form in {"original": original, **forms}.items()}
    best = {name: 1e3 * timing.best for name, timing in alternate(runs, ROUNDS).items()}
    chosen = min(forms, key=lambda name: best[name])
    height, width = example.shape[2:]
    report = OptimizeReport(
        steps=tuple(steps),
        milliseconds=best,
        chosen=chosen,
        gain=best["original"] / best[chosen],
        difference=apart[chosen],
        scale=scale,
        compile_seconds=compile_seconds,
        batch=len(example),
        image_size=(height, width),
        threads=torch.get_num_threads(),
    )
    return Optimized(forms[chosen], report)


@dataclass(frozen=True, kw_only=True)
class OptimizedFile:
    """The report of a model, and the file of its compiled form if one was asked for, with its time for the batch."""

    report: OptimizeReport
    file: ExportResult | None
    file_milliseconds: float

    def plain(self) -> dict[str, Any]:
        if self.file is None:
            return self.report.plain()
        return {**self.report.plain(), "file": self.file.plain(), "file_milliseconds": self.file_milliseconds}


def optimize_file(
    source: Source,
    out: AnyPath | None = None,
    *,
    image_size: Size | None = None,
    batch: int = 8,
    threads: int | None = None,
    compile: bool | None = None,
    force: bool = False,
    say: Say | None = None,
) -> OptimizedFile:
    """`optimize` for a model by name or file, on random images; with `out`, also its graph compiled into that file.

    The file (`mixlab.deploy.export.open_export` runs it) takes any number of images of the one size.
    """
    require(batch >= 1, f"a batch of 1 image or more; got {batch}.")
    with threads_set(threads):
        specimen = open_specimen(source, image_size)
        if not isinstance(specimen.model, Backbone):
            raise ConfigError(f"optimize takes Mixlab's classifiers; {specimen.name!r} is something else.")
        images = images_for(specimen, batch, seed=0)
        check(specimen.model, images, compile, BOUND)
        written = None
        if out is not None:  # first, so that a wrong path is found before the work
            written = export(specimen.model, out, "aot", image_size=specimen.image_size, force=force, say=say)
            written = replace(written, trained=specimen.trained)
        report = optimize(specimen.model, images, compile=compile, say=say).report
        assert report is not None
        milliseconds = math.nan
        if out is not None:
            run = open_export(out).run
            milliseconds = 1e3 * alternate({"file": lambda: run(images)}, ROUNDS)["file"].best
    return OptimizedFile(report=report, file=written, file_milliseconds=milliseconds)


def check(model: Backbone, example: Tensor, compile: bool | None, bound: float) -> None:
    """Raise before any work."""
    if not isinstance(model, Backbone):
        raise ConfigError(f"optimize takes a Mixlab model; got a {type(model).__name__}.")
    require(0 < bound < 1, f"a bound between 0 and 1; got {bound}.")
    model.check_image(example)
    require(len(example) > 0, "an example with one image or more.")
    if compile and not can_compile(example):
        raise CompileError(
            "Compiling needs a C++ compiler for the CPU and there is none ($CXX, g++, clang++, cl). "
            "Install one (Debian: apt-get install g++), or leave compile as it is."
        )


def can_compile(example: Tensor) -> bool:
    return example.device.type != "cpu" or has_compiler()


def scores_of(model: Backbone, example: Tensor) -> Tensor:
    with torch.inference_mode():
        scores: Tensor = model(example)
    return scores


def runner(model: Backbone, example: Tensor) -> Callable[[], None]:
    def run() -> None:
        scores_of(model, example)
        wait_for(example.device)

    return run
