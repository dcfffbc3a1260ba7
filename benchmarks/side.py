"""One side of a comparison in a process of its own, so that neither profits from what the other arranges in it.

It reads a line with the name of a job from its input, runs that job once, and answers with a line of JSON. The first
run of a job also builds what it needs.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

PAUSE = 0.05  # seconds after which the other side's threads no longer wait for work with a core in their hands
Kind = Literal["own", "timm", "plain", "form"]  # "form": our model, the mixer alone in its plain form


class Side:
    """The process, as seen from the one that measures."""

    def __init__(
        self, kind: Kind, name: str, *, batch: int, side: int, threads: int, keeps_memory: bool | None = None
    ) -> None:
        keeps = kind == "own" if keeps_memory is None else keeps_memory  # others: as PyTorch does by itself
        settings = {} if keeps else {"MIXLAB_KEEP_MEMORY": "0"}
        settings |= {"MIXLAB_NATIVE": "0"} if kind == "plain" else {}  # PyTorch's operators only
        words = [sys.executable, __file__, kind, name, str(batch), str(side), str(threads)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, env={**os.environ, **settings}, **pipes)  # type: ignore[call-overload]

    def run(self, job: str) -> dict[str, Any]:
        with contextlib.suppress(OSError):  # it has ended: there is no answer
            print(job, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process ended with {self.process.wait()} in or before {job}")
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait()


def beside(
    name: str, kind: Kind, *, batch: int, side: int, rounds: int, threads: int = 2
) -> tuple[float, float, float]:
    """Seconds of a pass: ours, the other kind as PyTorch does by itself, and that with freed memory kept as in ours."""
    about = {"batch": batch, "side": side, "threads": threads}
    sides = [Side("own", name, **about), Side(kind, name, **about), Side(kind, name, **about, keeps_memory=True)]
    best = [float("inf")] * 3
    for _ in range(rounds + 1):
        for index, process in enumerate(sides):
            time.sleep(PAUSE)
            start = time.perf_counter()
            process.run("eager")
            best[index] = min(best[index], time.perf_counter() - start)
    for process in sides:
        process.close()
    return best[0], best[1], best[2]


# -- the process itself --------------------------------------------------------------------------


def serve(kind: Kind, name: str, batch: int, side: int, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    build = {"own": own_model, "timm": timm_model, "plain": plain_model, "form": plain_form}[kind]
    jobs = Jobs(build(name), batch, side)
    for line in sys.stdin:
        try:
            answer = jobs.run(line.strip())
        except Exception as error:  # any: the one that measures says that this cell has no figure, and why
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), flush=True)


class Jobs:
    """eager, latency, training; of our own models optimised and optimised_latency; compiled, with weights as constants.

    Every answer is what is known about the job: nothing, or how long it took to compile.
    """

    def __init__(self, model: Any, batch: int, side: int) -> None:
        import torch

        self.model = model
        self.many, self.one = torch.randn(batch, 3, side, side), torch.randn(1, 3, side, side)
        self.ready: dict[str, tuple[Callable[[], None], dict[str, Any]]] = {}

    def run(self, job: str) -> dict[str, Any]:
        if job not in self.ready:
            self.ready[job] = self.prepare(job)
        run, about = self.ready[job]
        run()
        return about

    def prepare(self, job: str) -> tuple[Callable[[], None], dict[str, Any]]:
        if job == "training":
            return self.train, {}
        images = self.one if job.endswith("latency") else self.many
        if job.startswith("optimised"):
            import mixlab

            fast = mixlab.optimize(self.model.eval(), images)
            return lambda: infer(fast, images), {
                "form": fast.report.chosen,
                "compile_seconds": fast.report.compile_seconds,
            }
        if job.startswith("compiled"):
            import torch

            fast = torch.compile(self.model.eval().requires_grad_(False), options={"freezing": True})
            return lambda: infer(fast, images), {}
        return lambda: infer(self.model.eval(), images), {}

    def train(self) -> None:
        self.model.train()
        self.model(self.many).square().mean().backward()
        for parameter in self.model.parameters():
            parameter.grad = None


def infer(model: Any, images: Any) -> None:
    import torch

    with torch.inference_mode():
        model(images)


def own_model(name: str) -> Any:
    import mixlab

    return mixlab.create_model(name)


def timm_model(name: str) -> Any:
    import mixlab  # noqa: F401  mends a torchvision without operators, at which timm would stop

    import timm  # isort: skip

    return timm.create_model(name)


def plain_form(name: str) -> Any:
    """mLSTM in the quadratic parallel form; Hyena's filters made anew at every call, and the FFT."""
    import mixlab
    from mixlab.models.mixers.hyena import LongConv
    from mixlab.models.mixers.mlstm import Mlstm

    model = mixlab.create_model(name)
    for module in model.modules():
        if isinstance(module, LongConv):
            module.form, module.reuse = "fft", False
        if isinstance(module, Mlstm):
            module.form = "parallel"
    return model


def plain_model(name: str) -> Any:
    """`plain_form` with the rest of the model as it is written too: without engine and backends, mLSTM's projections by
    an einsum over blocks, StarReLU by its equation, the FFT of all channels at once.
    """
    import torch

    from mixlab.core import hooks
    from mixlab.models.layers import StarReLU
    from mixlab.ops import mlstm_layer
    from mixlab.ops.activations import star_relu_reference
    from mixlab.ops.operator import OPERATORS

    model, image = plain_form(name).eval(), torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        wanted = model(image)
    hooks.fill(hooks.Engine())
    for operator in OPERATORS.values():
        operator.backends.clear()
        operator.trainers.clear()
    mlstm_layer.cell_inputs = mlstm_layer.written_inputs
    for module in model.modules():
        if isinstance(module, StarReLU):
            module.forward = functools.partial(star_relu_reference, scale=module.scale, shift=module.bias)
    with torch.inference_mode():
        torch.testing.assert_close(model(image), wanted, rtol=0, atol=1e-3 * float(wanted.std()))
    return model


if __name__ == "__main__":
    kind, name, *numbers = sys.argv[1:]
    serve(kind, name, *(int(number) for number in numbers))  # type: ignore[arg-type]
