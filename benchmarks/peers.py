"""Every family beside its peer: images per second, latency of one image, training step; with --full also optimised
and compiled forms, compile time and memory. Writes benchmarks/results.json and the table of docs/performance.md.

python benchmarks/peers.py                      # quick: about 5 minutes on 2 cores
python benchmarks/peers.py --full               # everything, an hour; needs g++
python benchmarks/peers.py vil_tiny --print     # one model, nothing is written

The peer is timm's model of the same name. Where timm has none it is the plain reference of the same model: the
quadratic parallel form for Vision-LSTM, filters made anew and the FFT for Hyena. Both sides take turns in one process;
a ratio is that of the best runs, and the interval is of the median over pairs.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mixlab
from mixlab.errors import MixlabError
from mixlab.evals.compile_time import compile_time
from mixlab.evals.execution import Execution
from mixlab.evals.speed import peak_memory_mb
from mixlab.evals.turns import Plan, Ratio, take_turns
from mixlab.files import write_whole
from mixlab.ops.linear import linear
from mixlab.report.results import describe_machine

import timm  # isort: skip  (after mixlab, which mends a torchvision without operators)

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parent / "docs" / "performance.md"
START, END = "<!-- peers: start -->", "<!-- peers: end -->"
SIZES = (224, 448, 896)  # of the memory of one image
BATCH, SIDE = 8, 224
PLAIN: dict[str, dict[str, Any]] = {
    "vil_tiny": {"mixers": {"name": "mlstm", "form": "parallel"}},
    "hpx_former_s18": {"form": "fft", "reuse": False},
    "hb_former_s18": {"form": "fft", "reuse": False},
}
NAMES = (
    "convformer_s18",
    "caformer_s18",
    "poolformerv2_s12",
    "coat_lite_small",
    "coat_tiny",
    "sequencer2d_s",
    "vil_tiny",
    "hpx_former_s18",
    "hb_former_s18",
)


# -- the two sides -------------------------------------------------------------------------------


def own_model(name: str) -> mixlab.Backbone:
    torch.manual_seed(0)
    return mixlab.create_model(name)


def peer_model(name: str) -> nn.Module:
    if name not in PLAIN:
        return timm.create_model(name)
    if "mixers" in PLAIN[name]:
        return mixlab.create_model(name, **PLAIN[name])
    model = mixlab.create_model(name)
    for module in model.modules():
        for option, value in PLAIN[name].items():
            if hasattr(module, "reuse"):
                setattr(module, option, value)
    return model


def inference(model: nn.Module, images: Tensor) -> Callable[[], None]:
    model.eval()

    def run() -> None:
        with torch.inference_mode():
            model(images)

    return run


def training(model: nn.Module, images: Tensor) -> Callable[[], None]:
    model.train()

    def run() -> None:
        model(images).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return run


def frozen(model: nn.Module) -> nn.Module:
    """A peer compiled as a whole with its weights as constants."""
    model.eval().requires_grad_(False)
    compiled: nn.Module = torch.compile(model, options={"freezing": True})  # type: ignore[assignment]
    return compiled


# -- what is measured ----------------------------------------------------------------------------


def pair(own: Callable[[], None], peer: Callable[[], None], plan: Plan, batch: int) -> dict[str, float]:
    seconds = take_turns({"own": own, "peer": peer}, plan)
    ratio = Ratio.of(seconds["own"], seconds["peer"])
    spread = max(max(values) / min(values) - 1 for values in seconds.values())
    return {
        "own_ms": 1e3 * min(seconds["own"]),
        "peer_ms": 1e3 * min(seconds["peer"]),
        "own_images_per_second": batch / min(seconds["own"]),
        "peer_images_per_second": batch / min(seconds["peer"]),
        "ratio": ratio.best,
        "median": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "spread": spread,
        "rounds": len(seconds["own"]),
    }


def measure(name: str, plan: Plan, *, full: bool) -> dict[str, Any]:
    many, one = torch.randn(BATCH, 3, SIDE, SIDE), torch.randn(1, 3, SIDE, SIDE)
    own, peer = own_model(name), peer_model(name)
    found: dict[str, Any] = {"peer": "plain reference" if name in PLAIN else f"timm {timm.__version__}"}
    found["gmacs"] = mixlab.macs(own, SIDE) / 1e9
    steps: dict[str, Callable[[], Any]] = {
        "eager": lambda: pair(inference(own, many), inference(peer, many), plan, BATCH),
        "latency": lambda: pair(inference(own, one), inference(peer, one), plan, 1),
        "training": lambda: pair(training(own, many), training(peer, many), plan, BATCH),
    }
    if full:
        steps["optimised"] = lambda: optimised(own, peer, many, plan)
        steps["optimised_latency"] = lambda: optimised(own, peer, one, plan)
        steps["optimised_and_compiled_peer"] = lambda: optimised(own, frozen(peer), many, plan)
        steps["compile"] = lambda: compile_time(name, (SIDE, SIDE), batch=BATCH, execution=Execution()).plain()
        steps["memory_mb"] = lambda: {str(side): memory(name, side) for side in SIZES}
    for step, run in steps.items():
        try:
            found[step] = run()
        except (MixlabError, RuntimeError) as error:
            found[step] = {"reason": " ".join(str(error).split())[:200]}
        print(f"{name:18} {step:28} {brief(found[step])}", flush=True)
        gc.collect()
    return found


def optimised(own: mixlab.Backbone, peer: nn.Module, images: Tensor, plan: Plan) -> dict[str, Any]:
    fast = mixlab.optimize(own.eval(), images)
    assert fast.report is not None
    found = pair(inference(fast, images), inference(peer, images), plan, len(images))
    torch._dynamo.reset()
    return {**found, "form": fast.report.chosen, "compile_seconds": fast.report.compile_seconds}


def memory(name: str, side: int) -> dict[str, float | None]:
    peer = None if name in PLAIN else peak_memory_mb(f"timm:{name}", side)
    return {"own": peak_memory_mb(name, side), "peer": peer}


def brief(found: dict[str, Any]) -> str:
    if "ratio" in found:
        return (
            f"{found['own_ms']:8.1f} ms, peer {found['peer_ms']:8.1f} ms, ratio {found['ratio']:.2f} "
            f"(median {found['median']:.2f}, {found['low']:.2f} to {found['high']:.2f})"
        )
    return json.dumps(found)[:160]


def peak() -> float:
    """Thousand million multiply-accumulates per second of a large product, which no model can exceed."""
    x, weight = torch.randn(2048, 1280), torch.randn(1280, 1280)
    with torch.inference_mode():
        seconds = take_turns({"product": lambda: linear(x, weight)}, Plan(seconds=2.0, least=50))["product"]
    return x.shape[0] * weight.numel() / min(seconds) / 1e9


# -- what is written -----------------------------------------------------------------------------


def table(models: dict[str, Any], most: float) -> list[str]:
    full = any("optimised" in found for found in models.values())
    titles = [
        "model",
        "peer",
        "images/s",
        "peer's",
        "ratio",
        "of peak",
        "latency ms",
        "peer's",
        "ratio",
        "training ratio",
    ]
    titles += ["optimised: ratio", "latency ratio", "ratio to compiled peer"] if full else []
    lines = [f"| {' | '.join(titles)} |", "|---|---|" + "--:|" * (len(titles) - 2)]
    for name, found in models.items():
        eager, latency = found["eager"], found["latency"]
        cells = [f"`{name}`", found["peer"]]
        cells += [number(eager, "own_images_per_second", 1), number(eager, "peer_images_per_second", 1), number(eager)]
        cells += [f"{100 * found['gmacs'] * eager['own_images_per_second'] / most:.0f}%"]
        cells += [number(latency, "own_ms", 0), number(latency, "peer_ms", 0), number(latency)]
        cells += [number(found["training"])]
        if full:
            steps = ("optimised", "optimised_latency", "optimised_and_compiled_peer")
            cells += [number(found.get(step, {})) for step in steps]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def number(found: dict[str, Any], name: str = "ratio", digits: int = 2) -> str:
    return f"{found[name]:.{digits}f}" if name in found else ""


def write(models: dict[str, Any], threads: int, most: float) -> None:
    about = {key: str(value) for key, value in describe_machine().items()}
    whole: dict[str, Any] = {
        "machine": about,
        "threads": threads,
        "batch": BATCH,
        "image_size": SIDE,
        "peak_gmacs": most,
    }
    whole["models"] = models
    write_whole(RESULTS, json.dumps(whole, indent=1) + "\n")
    page = PAGE.read_text()
    before, rest = page.split(START)
    _, behind = rest.split(END)
    told = f"{about['processor']}, {threads} threads, PyTorch {about['PyTorch']}, float32, batch {BATCH}, {SIDE} px; "
    told += f"a large product reaches {most:.0f} thousand million multiply-accumulates per second (peak)."
    write_whole(PAGE, f"{before}{START}\n{told}\n\n" + "\n".join(table(models, most)) + f"\n{END}{behind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NAMES), help="models; default: one or two of every family")
    parser.add_argument("--full", action="store_true", help="optimised and compiled forms, compile time, memory")
    parser.add_argument("--seconds", type=float, default=3.0, help="at least, per pair")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--print", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    plan = Plan(seconds=arguments.seconds, least=5, warmup=1, patience=2.0)
    unknown = sorted(set(arguments.names) - set(NAMES))
    if unknown:
        sys.exit(f"No peer is known for {', '.join(unknown)}. Known: {', '.join(NAMES)}")
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    models: dict[str, Any] = known["models"]
    most = peak()
    for name in arguments.names:  # what is not measured now stays
        models[name] = {**models.get(name, {}), **measure(name, plan, full=arguments.full)}
        if not arguments.print:  # after each, so that an interrupted run leaves what it has
            write({name: models[name] for name in NAMES if name in models}, arguments.threads, most)


if __name__ == "__main__":
    main()
