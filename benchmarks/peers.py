"""Every family beside its peer: images per second, latency of one image, training step; with --full also optimized
and compiled forms, compile time and memory. Writes benchmarks/results.json and the table of docs/performance.md.

python benchmarks/peers.py                      # quick: about 5 minutes on 2 cores
python benchmarks/peers.py --full               # everything, an hour; needs g++
python benchmarks/peers.py vil_tiny --print     # one model, nothing is written

The peer is timm's model of the same name. Where timm has none it is the plain reference of the same model (see
`side.plain_model`). Each side is a process of its own, the peer's as somebody has it who uses nothing of Mixlab's; they
take turns, one runs at a time. A ratio is that of the best runs, and the interval is of the median over pairs.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from side import Kind, Side

import mixlab
from mixlab.core.errors import MixlabError
from mixlab.core.files import write_whole
from mixlab.evals.cost.compile_time import compile_time
from mixlab.evals.cost.execution import Execution
from mixlab.evals.cost.speed import peak_memory_mb
from mixlab.findings.results import describe_machine
from mixlab.metrics.timing import Ratio, Rounds, take_turns
from mixlab.ops.linear import linear

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parent / "docs" / "performance.md"
START, END = "<!-- peers: start -->", "<!-- peers: end -->"
SIZES = (224, 448, 896)  # of the memory of one image
BATCH, SIDE = 8, 224
PLAIN = ("vil_tiny", "hpx_former_s18", "hb_former_s18")  # timm has none of them
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


# -- what is measured ----------------------------------------------------------------------------


def pair(sides: dict[str, Side], jobs: tuple[str, str], plan: Rounds, batch: int) -> dict[str, Any]:
    own, peer = sides["own"], sides["peer"]
    about = own.run(jobs[0])
    peer.run(jobs[1])
    seconds = take_turns({"own": lambda: own.run(jobs[0]), "peer": lambda: peer.run(jobs[1])}, plan)
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
        **about,
    }


QUICK = {"eager": ("eager", "eager"), "latency": ("latency", "latency"), "training": ("training", "training")}
FULL = {
    "optimized": ("optimized", "eager"),
    "optimized_latency": ("optimized_latency", "latency"),
    "optimized_and_compiled_peer": ("optimized", "compiled"),
}  # the job of our side, and of the peer's


def measure(name: str, plan: Rounds, threads: int, *, full: bool) -> dict[str, Any]:
    kinds: dict[str, Kind] = {"own": "own", "peer": "plain" if name in PLAIN else "timm"}
    found: dict[str, Any] = {"peer": "plain reference" if name in PLAIN else f"timm {version('timm')}"}
    found["gmacs"] = mixlab.macs(mixlab.create_model(name), SIDE) / 1e9
    sides = {side: Side(kind, name, batch=BATCH, side=SIDE, threads=threads) for side, kind in kinds.items()}

    def keep(step: str, run: Callable[[], dict[str, Any]]) -> None:
        try:
            found[step] = run()
        except (MixlabError, RuntimeError, ValueError) as error:
            found[step] = {"reason": " ".join(str(error).split())[:200]}
        print(f"{name:18} {step:28} {brief(found[step])}", flush=True)

    try:
        for step, jobs in {**QUICK, **(FULL if full else {})}.items():
            batch = 1 if "latency" in step else BATCH
            keep(step, functools.partial(pair, sides, jobs, plan, batch))
    finally:
        for process in sides.values():
            process.close()
    if full:
        keep("compile", lambda: compile_time(name, (SIDE, SIDE), batch=BATCH, execution=Execution()).plain())
        keep("memory_mb", lambda: {str(side): memory(name, side) for side in SIZES})
        keep("training_memory_mb", lambda: memory(name, SIDE, batch=BATCH, training=True))
    return found


def memory(name: str, side: int, *, batch: int = 1, training: bool = False) -> dict[str, float | None]:
    peer = None if name in PLAIN else peak_memory_mb(f"timm:{name}", side, batch=batch, training=training)
    return {"own": peak_memory_mb(name, side, batch=batch, training=training), "peer": peer}


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
        seconds = take_turns({"product": lambda: linear(x, weight)}, Rounds(seconds=2.0, least=50))["product"]
    return x.shape[0] * weight.numel() / min(seconds) / 1e9


# -- what is written -----------------------------------------------------------------------------


def table(models: dict[str, Any], most: float) -> list[str]:
    full = any("optimized" in found for found in models.values())
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
    titles += ["optimized: ratio", "latency ratio", "ratio to compiled peer"] if full else []
    lines = [f"| {' | '.join(titles)} |", "|---|---|" + "--:|" * (len(titles) - 2)]
    for name, found in models.items():
        eager, latency = found["eager"], found["latency"]
        cells = [f"`{name}`", found["peer"]]
        cells += [number(eager, "own_images_per_second", 1), number(eager, "peer_images_per_second", 1), number(eager)]
        cells += [f"{100 * found['gmacs'] * eager['own_images_per_second'] / most:.0f}%"]
        cells += [number(latency, "own_ms", 0), number(latency, "peer_ms", 0), number(latency)]
        cells += [number(found["training"])]
        if full:
            steps = ("optimized", "optimized_latency", "optimized_and_compiled_peer")
            cells += [number(found.get(step, {})) for step in steps]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def memory_table(models: dict[str, Any]) -> list[str]:
    """Of one image at every size, and of a training step."""
    sizes = [f"{size} px" for size in SIZES]
    titles = ["model", *(title for size in (*sizes, f"training, {BATCH} x {SIDE} px") for title in (size, "peer's"))]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "--:|" * (len(titles) - 1)]
    for name, found in models.items():
        if "memory_mb" in found:
            measured = [found["memory_mb"].get(str(size), {}) for size in SIZES] + [found.get("training_memory_mb", {})]
            cells = [f"{one[side]:.0f}" if one.get(side) else "" for one in measured for side in ("own", "peer")]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


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
    lines = [told, "", *table(models, most)]
    if needed := memory_table(models):
        lines += ["", "Memory in MB, weights included: of one image, and of a training step.", "", *needed]
    write_whole(PAGE, f"{before}{START}\n" + "\n".join(lines) + f"\n{END}{behind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NAMES), help="models; default: one or two of every family")
    parser.add_argument("--full", action="store_true", help="optimized and compiled forms, compile time, memory")
    parser.add_argument("--seconds", type=float, help="at least, per pair; 1, in full 3")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--print", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    seconds, least = (3.0, 5) if arguments.full else (1.0, 3)
    plan = Rounds(seconds=arguments.seconds or seconds, least=least, warmup=1, patience=2.0)
    unknown = sorted(set(arguments.names) - set(NAMES))
    if unknown:
        sys.exit(f"No peer is known for {', '.join(unknown)}. Known: {', '.join(NAMES)}")
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    models: dict[str, Any] = known["models"]
    most = peak()
    for name in arguments.names:  # what is not measured now stays
        models[name] = {**models.get(name, {}), **measure(name, plan, arguments.threads, full=arguments.full)}
        if not arguments.print:  # after each, so that an interrupted run leaves what it has
            write({name: models[name] for name in NAMES if name in models}, arguments.threads, most)


if __name__ == "__main__":
    main()
