"""What a model costs to run on this machine: images per second, latency, peak memory.

Timings of a shared machine are noisy: the best of several rounds is what the machine can do, and how far the slowest
lies from it says how much to believe. For a ratio, run both sides in turn with `mixlab.metrics.timing.take_turns`.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mixlab.core.errors import ConfigError, MixlabError, require
from mixlab.evals.cost.execution import Execution, random_images, step, wait_for
from mixlab.evals.cost.whole_task import is_whole_task, whole_task
from mixlab.metrics.timing import Rounds, Timing, take_turns
from mixlab.metrics.timing import alternate as alternate  # where release 0.1 had it
from mixlab.models.config import MIN_SIDE, parse_image_size
from mixlab.models.zoo import create_model, ensemble_row, list_models

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what resets VmHWM to VmRSS when it is written to CLEAR
MEBIBYTE = 2**20
TIMM = "timm:"


@dataclass(frozen=True)
class Speed:
    """Throughput of a model; `timing` is of one batch."""

    images_per_second: float  # of the best round
    timing: Timing
    batch: int
    image_size: tuple[int, int]
    training: bool
    threads: int
    device: str

    @property
    def batch_ms(self) -> float:
        """Milliseconds of one batch in the best round: the latency if the batch is one image."""
        return 1e3 * self.timing.best

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "image_size": list(self.image_size)}


# -- time ----------------------------------------------------------------------------------------


def measure_speed(
    model: nn.Module,
    image_size: int | tuple[int, int],
    *,
    batch: int,
    seconds: float = 1.0,
    rounds: int = 5,
    training: bool = False,
    in_channels: int | None = None,
) -> Speed:
    """Images per second on random images; for training, of forward and backward without an optimizer.

    `seconds` is what all rounds take together, after a warm-up as long as one round; a round is at least one batch. The
    model is left as it was: modes, gradients, buffers. So is the random state. A model that is not Mixlab's needs
    `in_channels`, such as a subject's `model` the subject's.
    """
    require(
        batch >= 1 and seconds > 0 and rounds >= 1, f"batch, seconds, rounds above 0; got {batch, seconds, rounds}."
    )
    height, width = parse_image_size(image_size)
    device = next(model.parameters()).device
    with untouched(model, training=training):
        images = random_images(model, batch, height, width, in_channels)

        def steps(count: int) -> None:
            for _ in range(count):
                step(model, images, training=training)
            wait_for(device)

        steps(1)  # the first one also allocates
        count = 1
        for _ in range(2):
            trial = take_turns({"model": partial(steps, count)}, Rounds.exactly(1))["model"][0]
            count = max(1, round(count * seconds / rounds / trial))
        timed = take_turns({"model": partial(steps, count)}, Rounds.exactly(rounds))["model"]
        timing = Timing.of([elapsed / count for elapsed in timed])
    threads = torch.get_num_threads()
    return Speed(batch / timing.best, timing, batch, (height, width), training, threads, device.type)


def latency_ms(model: nn.Module, image_size: int | tuple[int, int], *, seconds: float = 1.0, rounds: int = 5) -> float:
    """Milliseconds for one image, inference."""
    return measure_speed(model, image_size, batch=1, seconds=seconds, rounds=rounds).batch_ms


@contextlib.contextmanager
def untouched(model: nn.Module, *, training: bool) -> Iterator[None]:
    """The model in training or eval mode inside, and behind it as it was before."""
    modes = {module: module.training for module in model.modules()}
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            model.train(training)
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


# -- memory --------------------------------------------------------------------------------------


def peak_memory_mb(
    name: str | PathLike[str],
    image_size: int | tuple[int, int],
    *,
    batch: int = 1,
    training: bool = False,
    overrides: Mapping[str, object] | None = None,
    execution: Mapping[str, object] | None = None,
    limit_seconds: float = 300.0,
) -> float:
    """Mebibytes that a model needs on the CPU: its weights, and the peak of what one batch takes beside them.

    `name` is a model, a weight file that `save_weights` wrote, or another text that `open_subject` takes, such as
    timm:resnet50 (its `overrides` are image_size, num_classes and in_channels). `execution` has the fields of an
    `Execution` beside `training`: dtype, layout, optimizer, whose state then counts. Measured in a process of its own,
    where nothing else raises the peak; Python and PyTorch themselves are not counted. The model is built for
    `image_size` unless `overrides` say otherwise.

    On Linux the peak starts anew behind a warm-up with one small image. Elsewhere only the highest peak since the start
    of the process is known (`getrusage`), so a batch that needs less than the warm-up counts as nothing.
    """
    require(batch >= 1 and limit_seconds > 0, f"a batch and a time limit above 0; got {batch} and {limit_seconds}.")
    size = parse_image_size(image_size)
    how = Execution(**{"training": training, **(execution or {})})  # type: ignore[arg-type]
    job = {**source_of(name), "image_size": size, "batch": batch, "threads": torch.get_num_threads()}
    job["execution"] = asdict(how)
    try:
        text = json.dumps({**job, "overrides": {"image_size": size, **(overrides or {})}})
    except TypeError as error:
        raise ConfigError(f"overrides must be plain values (numbers, strings, lists, mappings): {error}.") from error
    return run_child(text, str(name), limit_seconds)


def source_of(name: str | PathLike[str]) -> dict[str, str]:
    """What the child builds its model from. An unknown name is an error here, not only there."""
    text = str(name)
    named = isinstance(name, str) and text.partition("=")[0] in list_models() and "=" in text
    if text.startswith(TIMM) or named or is_whole_task(text):
        return {"subject": text}
    if is_file(name):
        return {"weights": str(Path(name).absolute())}
    ensemble_row(text)
    return {"name": text}


def is_file(name: str | PathLike[str]) -> bool:
    return isinstance(name, PathLike) or Path(name).is_file() or Path(name).name != name


def run_child(job: str, name: str, limit_seconds: float) -> float:
    return float(child_answer("mixlab.evals.cost.speed", job, f"peak memory of {name!r}", limit_seconds)["mb"])


def child_answer(
    module: str, job: str, what: str, limit_seconds: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The JSON that a module prints in a process of its own when it is run with a job; `what` says what it measures."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # the child finds what this process finds
    command = [sys.executable, "-P", "-m", module, "--child", job]
    variables = {**os.environ, "PYTHONPATH": paths, **(environment or {})}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, env=variables)
    except subprocess.TimeoutExpired as error:
        raise MixlabError(
            f"The {what} was not known after {limit_seconds:g} seconds. "
            f"Take a smaller batch or image, or raise the time limit."
        ) from error
    lines = done.stderr.strip().splitlines() or ["it said nothing"]
    if done.returncode == 2:
        raise ConfigError(f"The {what} cannot be measured: {lines[-1]}")
    if done.returncode != 0:
        raise MixlabError(f"The process that measures the {what} {describe_exit(done.returncode)}: {lines[-1]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def describe_exit(code: int) -> str:
    if code == -getattr(signal, "SIGKILL", 9):
        return "was killed, most likely because memory ran out (take a smaller batch or image)"
    return f"died of signal {-code}" if code < 0 else f"ended with code {code}"


def measure_memory(job: Mapping[str, Any]) -> float:
    """In the child: weights, and growth of the peak of resident memory over a small warm-up."""
    torch.set_num_threads(job["threads"])
    execution = Execution(**job["execution"])
    execution.check(torch.device("cpu"))
    model, channels = open_model(job)
    model = execution.prepare(model)
    held = sum(tensor.nbytes for tensor in itertools.chain(model.parameters(), model.buffers())) / MEBIBYTE
    small = job["image_size"] if "subject" in job else (MIN_SIDE, MIN_SIDE)  # others may take one size only
    execution.runner(model, execution.images(model, 1, small, channels))()
    before = reset_peak()
    execution.runner(model, execution.images(model, job["batch"], job["image_size"], channels))()
    return held + max(0.0, peak() - before)


def open_model(job: Mapping[str, Any]) -> tuple[nn.Module, int | None]:
    if "subject" not in job:
        return create_model(job.get("name"), weights=job.get("weights"), **job["overrides"]), None
    from mixlab.evals.subjects import open_subject

    text, changes = job["subject"], dict(job["overrides"])
    size = changes.pop("image_size")
    if is_whole_task(text):
        return whole_task(text, parse_image_size(job["image_size"]), changes), None
    free = {key: changes.pop(key) for key in ("num_classes", "in_channels") if key in changes}
    subject = open_subject(text, image_size=size, **free, changes=changes)
    return subject.model, subject.in_channels


def reset_peak() -> float:
    """Give free memory back, let the peak start anew from what is in use where the system can, and return it."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc's; what the warm-up freed would hide what the batch takes
    with contextlib.suppress(OSError):
        CLEAR.write_text(RESET_PEAK)
    return peak()


def peak() -> float:
    """Mebibytes. On Linux `getrusage` would count what the parent had when it started this process."""
    with contextlib.suppress(OSError, IndexError):
        return int(re.findall(r"VmHWM:\s+(\d+)", STATUS.read_text())[0]) / 1024
    try:
        import resource
    except ImportError as error:
        raise MixlabError("Peak memory cannot be measured on this system: it has no getrusage.") from error
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / MEBIBYTE if sys.platform == "darwin" else most / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description="The process that `peak_memory_mb` starts.")
    parser.add_argument("--child", required=True, help="the job as JSON")
    try:
        print(json.dumps({"mb": measure_memory(json.loads(parser.parse_args().child))}))
    except MixlabError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    except MemoryError:
        print("memory ran out.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
