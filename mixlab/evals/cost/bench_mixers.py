"""Token mixers alone against the number of tokens (HyenaPixel, Figure 2): time, exact MACs, and how both grow."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from mixlab.core.errors import MacsError, MixlabError, require
from mixlab.core.processes import choose_device
from mixlab.evals.cost.bench import Watch, reason_of, run_all, threads_set
from mixlab.evals.cost.bench_case import machine_line
from mixlab.evals.cost.bench_figures import Curve, scaling_curves
from mixlab.evals.cost.execution import DTYPES, check_dtype, products_of, wait_for
from mixlab.evals.cost.mixer_alone import Alone, Entry, count_mixer, estimate_bytes, grid_of, label_of, parse_mixer
from mixlab.evals.cost.scaling import exponent
from mixlab.evals.cost.speed import MEBIBYTE
from mixlab.findings.findings import Finding, Picture, finding
from mixlab.findings.svg import need
from mixlab.metrics.timing import Rounds, Run, Timing, take_turns
from mixlab.training.fits import free_bytes

LENGTHS = (256, 576, 1024, 2304, 4096, 9216, 16384)
GLOBAL = ("attention", "mlstm", "rnn2d", "convattention", "hyena_bidirectional", "hyena_pixel")
SHARE = 0.5  # of the free memory that the estimate for one mixer may take


@dataclass(frozen=True, kw_only=True)
class MixerConditions:
    """What all mixers have in common. `limit_seconds`: of one run, as the length before foretells it."""

    lengths: tuple[int, ...] = LENGTHS
    dim: int = 64
    batch: int = 1
    dtype: str = "float32"
    device: torch.device = torch.device("cpu")
    plan: Rounds = Rounds(seconds=2.0, least=5)
    limit_seconds: float = 60.0
    free_bytes: Callable[[], int | None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class MixerRow:
    """One mixer on one grid. `fourier_macs` are the part of the MACs that has a factor log N; `estimate_mb` is what it
    may need at most, as if no operator were fused.
    """

    mixer: str
    length: int
    height: int
    width: int
    dim: int
    batch: int
    dtype: str
    device: str
    threads: int
    machine: str
    macs: int | None = None
    fourier_macs: int | None = None
    estimate_mb: float | None = None
    warmup: int = 0
    repeats: int = 0
    best_ms: float | None = None
    median_ms: float | None = None
    spread: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class MixerScaling:
    """Exponents over the upper half of the lengths. `logarithmic`: the share of the MACs that has a factor log N, at
    the longest length; `fourier` is the exponent of that part, which is above 1 by about 1 / ln N.
    """

    mixer: str
    time: float | None
    macs: float | None
    fourier: float | None
    logarithmic: float

    def told(self, value: float | None) -> str:
        text = "exponent unknown" if value is None else f"N^{value:.2f}"
        return f"{self.mixer}: {text}" + (f", log N in {self.logarithmic:.0%} of MACs" if self.logarithmic else "")


# -- one mixer -----------------------------------------------------------------------------------


def measure_mixer(entry: Entry, conditions: MixerConditions) -> list[MixerRow]:
    """A row per length. All lengths take turns, so that a busy moment of the machine does not bend the curve."""
    rows, runs = {}, {}
    before: tuple[int, float] | None = None  # MACs and seconds of the length before
    for length in sorted(set(conditions.lengths)):
        row = start_row(entry, length, conditions)
        try:
            if not row.reason:
                row = guard(row, entry, conditions, before)
            if not row.reason:
                run = ready(entry, length, conditions)
                before = (row.macs or 0, seconds_of(run))
                runs[str(length)] = run
        except (MixlabError, RuntimeError, MemoryError) as error:
            row = replace(row, reason=reason_of(error))
        rows[length] = row
    timed = take_turns(runs, conditions.plan) if runs else {}
    return [with_timing(row, timed.get(str(length)), conditions.plan) for length, row in rows.items()]


def start_row(entry: Entry, length: int, conditions: MixerConditions) -> MixerRow:
    grid = grid_of(length)
    row = MixerRow(
        mixer=label_of(entry),
        length=length,
        height=grid.height,
        width=grid.width,
        **{name: getattr(conditions, name) for name in ("dim", "batch", "dtype")},
        device=str(conditions.device),
        threads=torch.get_num_threads(),
        machine=machine_line(),
    )
    try:
        macs, fourier = count_mixer(entry, length, conditions.dim)
    except MacsError:  # it can be timed all the same
        return row
    except MixlabError as error:
        return replace(row, reason=reason_of(error))
    return replace(row, macs=macs, fourier_macs=fourier)


def guard(row: MixerRow, entry: Entry, conditions: MixerConditions, before: tuple[int, float] | None) -> MixerRow:
    """The row with its estimate, and with a reason if it should not be run."""
    estimate = estimate_bytes(entry, row.length, conditions.dim, conditions.batch)
    row = replace(row, estimate_mb=estimate / MEBIBYTE)
    free = conditions.free_bytes()
    if free is not None and estimate > SHARE * free:
        needs = f"it may need {estimate / MEBIBYTE:.0f} MB, more than {SHARE:.0%} of the {free / MEBIBYTE:.0f} MB free"
        return replace(row, reason=f"not run: {needs}")
    expected = before[1] * (row.macs or 0) / before[0] if before is not None and before[0] else 0.0
    if expected > conditions.limit_seconds:
        reason = f"not run: one run may take {expected:.0f} s, more than {conditions.limit_seconds:g} s"
        return replace(row, reason=reason)
    return row


def ready(entry: Entry, length: int, conditions: MixerConditions) -> Run:
    """One forward pass on the device, which ends when the device is done."""
    dtype, device = DTYPES[conditions.dtype], conditions.device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Alone(parse_mixer(entry), conditions.dim, grid_of(length)).eval().to(device, dtype)
        tokens = torch.randn(conditions.batch, length, conditions.dim).to(device, dtype)

    def run() -> None:
        with torch.inference_mode():
            module(tokens)
        wait_for(device)

    return run


def seconds_of(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def with_timing(row: MixerRow, seconds: Sequence[float] | None, plan: Rounds) -> MixerRow:
    if seconds is None:
        return row
    timing = Timing.of(seconds)
    best, median = 1e3 * timing.best, 1e3 * timing.median
    row = replace(row, warmup=plan.warmup + 1, repeats=timing.rounds, spread=timing.spread)
    return replace(row, best_ms=best, median_ms=median)


# -- all of them ---------------------------------------------------------------------------------


def bench_mixers(
    mixers: Sequence[Entry] = GLOBAL,
    *,
    lengths: Sequence[int] = LENGTHS,
    dim: int = 64,
    batch: int = 1,
    dtype: str = "float32",
    device: str = "cpu",
    threads: int | None = None,
    plan: Rounds | None = None,
    limit_seconds: float = 60.0,
    watch: Watch | None = None,
) -> tuple[Finding, dict[str, Any]]:
    """Forward time and MACs of mixers (names, or mappings with a name and options) over lengths, with exponents.

    A length that may not fit into memory, or would take too long by what the length before took, is not run: its row
    says so. Its MACs are known all the same.
    """
    need("matplotlib.figure")
    require(dtype in DTYPES, f"a dtype among {', '.join(DTYPES)}; got {dtype!r}.")
    require(bool(mixers and lengths) and min(dim, batch) >= 1, "mixers, lengths, and a dim and batch of 1 or more.")
    for mixer in mixers:
        parse_mixer(mixer)
    for length in lengths:
        grid_of(length)
    chosen = choose_device(device, 0)
    check_dtype(dtype, chosen)
    conditions = MixerConditions(
        lengths=tuple(lengths),
        dim=dim,
        batch=batch,
        dtype=dtype,
        device=chosen,
        limit_seconds=limit_seconds,
        plan=plan or MixerConditions.plan,
        free_bytes=lambda: free_bytes(chosen),
    )
    with threads_set(threads), products_of(dtype, chosen):
        rows, interrupted = run_all(
            list(mixers),
            lambda entry: measure_mixer(entry, conditions),
            lambda entry, why: [replace(start_row(entry, at, conditions), reason=why) for at in sorted(set(lengths))],
            name=label_of,
            watch=watch,
        )
        return report([row for own in rows for row in own], conditions, interrupted=interrupted)


# -- what was found ------------------------------------------------------------------------------


def scalings(rows: Sequence[MixerRow]) -> list[MixerScaling]:
    """One per mixer."""
    found = []
    for mixer in dict.fromkeys(row.mixer for row in rows):
        own = [row for row in rows if row.mixer == mixer]
        macs, fourier, seconds = (
            exponent({row.length: getattr(row, name) for row in own}) for name in ("macs", "fourier_macs", "best_ms")
        )
        longest = max((row for row in own if row.macs), key=lambda row: row.length, default=None)
        share = (longest.fourier_macs or 0) / longest.macs if longest is not None and longest.macs else 0.0
        found.append(MixerScaling(mixer, seconds, macs, fourier, share))
    return found


def report(
    rows: Sequence[MixerRow], conditions: MixerConditions, *, interrupted: bool
) -> tuple[Finding, dict[str, Any]]:
    scaling = scalings(rows)
    panels = {
        "Forward time, ms": curves(rows, scaling, "best_ms", "time"),
        "Multiply-accumulates": curves(rows, scaling, "macs", "macs"),
    }
    panels = {title: drawn for title, drawn in panels.items() if drawn}
    figures = {"mixers": scaling_curves(panels, "tokens", guides=(1, 2))} if panels else {}
    caption = "cost of a token mixer against the number of tokens; exponents over the upper half of the lengths"
    found = finding(
        "bench_mixers",
        f"Token mixers against the number of tokens, {conditions.dim} channels",
        [field.name for field in fields(MixerRow)],
        [list(asdict(row).values()) for row in rows],
        settings={"interrupted": interrupted, "plan": asdict(conditions.plan), "fit": "upper half of the lengths"},
        data={"rows": [asdict(row) for row in rows], "scaling": [asdict(one) for one in scaling]},
        pictures=tuple(Picture(name=name, caption=caption) for name in figures),
    )
    return found, figures


def curves(rows: Sequence[MixerRow], scaling: Sequence[MixerScaling], value: str, kind: str) -> list[Curve]:
    found = []
    for one in scaling:
        points = [(row.length, getattr(row, value)) for row in rows if row.mixer == one.mixer and getattr(row, value)]
        if points:
            sizes, costs = zip(*sorted(points), strict=True)
            found.append(Curve(one.mixer, one.told(getattr(one, kind)), sizes, costs))
    return found
