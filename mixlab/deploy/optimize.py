"""A model made fast for inference on this machine: folded, packed, perhaps compiled; measured, and compared."""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mixlab.core.errors import CompileError, ConfigError, require
from mixlab.deploy.checking import images_for
from mixlab.deploy.export import ExportResult, export, open_export
from mixlab.deploy.folding import fold, keep_packed, pack
from mixlab.deploy.graph import first_lines
from mixlab.deploy.specimen import Size, Source, open_specimen
from mixlab.deploy.targets import AnyPath
from mixlab.engine.compile import compile_blocks, has_compiler
from mixlab.engine.serve import freeze, is_frozen
from mixlab.evals.cost.bench import threads_set
from mixlab.evals.cost.execution import wait_for
from mixlab.metrics.timing import time_rounds
from mixlab.models.config import ModelConfig
from mixlab.models.model import Model
from mixlab.ops.layers import PackedLinear

BOUND = 1e-4  # of the largest score, by which no score may differ
FLOOR = 1e-2  # scores below it are measured against it
ROUNDS = 5
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class OptimizeReport:
    """What was done and what it brought, on a batch like the example.

    `milliseconds` of the best run of the original and of every form that was tried; `chosen` is the fastest of all.
    `steps` are those of the chosen form, and why others were not taken.
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

    Nothing of it is trained, saved or moved: keep the original for that.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.report: OptimizeReport | None = None
        self.eval()

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.model.class_names

    @torch.compiler.disable
    def forward(self, image: Tensor) -> Tensor:
        with torch.inference_mode(), torch.autocast(image.device.type, enabled=False):
            scores: Tensor = self.model(image)
        return scores

    @torch.compiler.disable
    def embed(self, image: Tensor) -> Tensor:
        with torch.inference_mode(), torch.autocast(image.device.type, enabled=False):
            return self.model.embed(image)

    def train(self, mode: bool = True) -> "Optimized":
        if mode:
            raise only_inference("trained")
        return super().train(False)

    def state_dict(self, *arguments: Any, **words: Any) -> Any:
        raise only_inference("saved")

    def load_state_dict(self, *arguments: Any, **words: Any) -> Any:
        raise only_inference("given other weights")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Optimized":
        raise only_inference("moved or cast")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise only_inference("saved")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Optimized":
        """Weights that oneDNN packed are constants that cannot be copied: both have them."""
        packed = [layer.weight for layer in self.modules() if isinstance(layer, PackedLinear)]
        memo |= {id(weight): weight for weight in packed}
        twin = Optimized.__new__(Optimized)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if is_frozen(self.model):
            freeze(twin.model)
        return twin


def only_inference(done: str) -> ConfigError:
    return ConfigError(
        f"An optimised model is for inference here and cannot be {done}: its weights are folded and packed. "
        f"Do that with the original, and optimise it again."
    )


@dataclass(frozen=True)
class Attempt:
    """A form of the model, and what was done for it."""

    model: Optimized
    steps: tuple[str, ...]
    compile_seconds: float | None = None


def optimize(
    model: Model, example: Tensor, *, compile: bool | None = None, bound: float | None = None, say: Say | None = None
) -> Optimized:
    """A copy of a model for fast inference on batches like the example; the model itself is left alone.

    Factors are folded into linear layers; on top of that, weights are packed as products read them (float32 on a CPU),
    or the blocks are compiled where there is a compiler, identical ones sharing a graph: the fastest of these forms and
    the original is what comes back. `compile` False leaves that out, True insists on it. A form whose scores differ by
    more than `bound` of the largest score is not taken; by default that is 1e-4, and more for shorter floats than
    float32. What was done, and the gain, is in `report`.
    """
    check(model, example, compile, bound)
    tell = say or (lambda _: None)
    original = Optimized(copy.deepcopy(model).eval().requires_grad_(False))
    expected = original(example)
    scale = float(expected.abs().max())
    allowed = (max(BOUND, 32 * torch.finfo(example.dtype).eps) if bound is None else bound) * max(scale, FLOOR)
    attempts: dict[str, Attempt] = {}
    apart: dict[str, float] = {}
    rejected: list[str] = []
    for name, make in makers(model, example, compile, tell).items():
        found = make()
        if isinstance(found, str):
            rejected.append(found)
            continue
        apart[name] = float((found.model(example) - expected).abs().max())
        if apart[name] <= allowed:
            attempts[name] = found
        else:
            rejected.append(f"{name} form not taken: scores differ by {apart[name]:.1e}")
    if compile and "compiled" not in attempts:
        raise CompileError(f"The compiled form was not taken. {'; '.join(rejected)}")
    tell("measuring")
    best = measure({"original": original, **{name: one.model for name, one in attempts.items()}}, example)
    chosen = "compiled" if compile else min(best, key=lambda name: best[name])
    taken = attempts.get(chosen, Attempt(original, ()))
    height, width = example.shape[2:]
    taken.model.report = OptimizeReport(
        steps=(*taken.steps, *rejected),
        milliseconds=best,
        chosen=chosen,
        gain=best["original"] / best[chosen],
        difference=apart.get(chosen, 0.0),
        scale=scale,
        compile_seconds=taken.compile_seconds,
        batch=len(example),
        image_size=(height, width),
        threads=torch.get_num_threads(),
    )
    return taken.model


def makers(model: Model, example: Tensor, compile: bool | None, tell: Say) -> dict[str, Callable[[], Attempt | str]]:
    """The forms to try; one that cannot be made is a reason instead."""

    def folded() -> tuple[Model, list[str]]:
        own = copy.deepcopy(model).eval().requires_grad_(False)
        return own, fold(own) if example.dtype in (torch.float32, torch.float64) else []

    def eager() -> Attempt:
        tell("folding")
        own, steps = folded()
        return Attempt(Optimized(own), tuple(steps))

    def packed() -> Attempt | str:
        tell("packing")
        own, steps = folded()
        if count := keep_packed(own, example):
            return Attempt(Optimized(own), (*steps, f"{count} weights packed once for all calls of kernels"))
        if count := pack(own):
            return Attempt(Optimized(own), (*steps, f"weights of {count} linear layers packed once for all calls"))
        return "no weights to pack"

    def compiled() -> Attempt | str:
        tell("compiling")
        own, steps = folded()
        start = time.perf_counter()
        try:
            fast = Optimized(compile_blocks(own))
            fast(example)
        except Exception as error:  # whatever a compiler says
            if compile:
                raise CompileError(f"The blocks cannot be compiled: {first_lines(error)}") from error
            return f"not compiled: {first_lines(error)}"
        seconds = time.perf_counter() - start
        return Attempt(fast, (*steps, f"blocks compiled in {seconds:.0f} s"), seconds)

    wanted = compile or (compile is None and can_compile(example))
    return {"eager": eager, "packed": packed, **({"compiled": compiled} if wanted else {})}


def measure(models: Mapping[str, Optimized], example: Tensor) -> dict[str, float]:
    """Milliseconds of the best run of each, in turn."""
    return {name: 1e3 * timing.best for name, timing in time_rounds(runners(models, example), ROUNDS).items()}


def runners(models: Mapping[str, Callable[[Tensor], Tensor]], example: Tensor) -> dict[str, Callable[[], None]]:
    def runner(model: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def run() -> None:
            model(example)
            wait_for(example.device)

        return run

    return {name: runner(model) for name, model in models.items()}


@dataclass(frozen=True, kw_only=True)
class OptimizedFile:
    """The report of a model, and the file of its compiled graph if one was asked for: how many times as fast as the
    original it is on that batch.
    """

    report: OptimizeReport
    file: ExportResult | None = None
    file_gain: float | None = None

    def plain(self) -> dict[str, Any]:
        if self.file is None:
            return self.report.plain()
        return {**self.report.plain(), "file": self.file.plain(), "file_gain": self.file_gain}


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

    The file is what `export` writes as "aot" (`mixlab.deploy.export.open_export` runs it): the model's own graph,
    compiled for any number of images of the one size.
    """
    require(batch >= 1, f"a batch of 1 image or more; got {batch}.")
    with threads_set(threads):
        specimen = open_specimen(source, image_size)
        if not isinstance(specimen.model, Model):
            raise ConfigError(f"optimize takes Mixlab's classifiers; {specimen.name!r} is something else.")
        images = images_for(specimen, batch, seed=0)
        check(specimen.model, images, compile, None)
        if out is None:
            report = optimize(specimen.model, images, compile=compile, say=say).report
            assert report is not None
            return OptimizedFile(report=report)
        # the file comes first: a path that cannot be written is then found at once
        written = export(specimen.model, out, "aot", image_size=specimen.image_size, force=force, say=say)
        report = optimize(specimen.model, images, compile=compile, say=say).report
        assert report is not None
        forms: dict[str, Callable[[Tensor], Tensor]] = {
            "original": Optimized(copy.deepcopy(specimen.model)),
            "file": open_export(out).run,
        }
        best = {name: timing.best for name, timing in time_rounds(runners(forms, images), ROUNDS).items()}
    written = replace(written, trained=specimen.trained)
    return OptimizedFile(report=report, file=written, file_gain=best["original"] / best["file"])


def check(model: Model, example: Tensor, compile: bool | None, bound: float | None) -> None:
    """Raise before any work."""
    if not isinstance(model, Model):
        raise ConfigError(f"optimize takes a Mixlab model; got a {type(model).__name__}.")
    require(bound is None or 0 < bound < 1, f"a bound between 0 and 1; got {bound}.")
    model.check_image(example)
    require(len(example) > 0, "an example with one image or more.")
    if compile and not can_compile(example):
        raise CompileError(
            "Compiling needs a C++ compiler for the CPU and there is none ($CXX, g++, clang++, cl). "
            "Install one (Debian: apt-get install g++), or leave compile as it is."
        )


def can_compile(example: Tensor) -> bool:
    return example.device.type != "cpu" or has_compiler()
