"""Activations alone: FLOPs per unit as MetaFormer counts them (2.4.1), and speed as in its Table 11."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mixlab.core.errors import ConfigError, MacsError, near_misses, require
from mixlab.core.processes import choose_device
from mixlab.evals.cost.bench import Watch, reason_of, threads_set
from mixlab.evals.cost.bench_case import machine_line
from mixlab.evals.cost.bench_figures import bars, colors_of
from mixlab.evals.cost.execution import DTYPES, check_dtype, require_compiler, wait_for
from mixlab.findings.findings import Finding, Picture, finding
from mixlab.findings.svg import need
from mixlab.metrics.timing import Ratio, Rounds, Run, Timing, take_turns
from mixlab.ops.activations import squared_relu, star_relu, star_relu_reference

aten = torch.ops.aten
UNITS = 1_000_000  # Table 11: an input of 1 x 1M
CALLS = 100  # on an accelerator, between two waits for it: one wait takes longer than an activation
BASELINE = "GELU (Equation 9)"
TANH = 6  # FLOPs, the footnote of 2.4.1
SCALE, BIAS = 1 / math.sqrt(1.25), -0.5 / math.sqrt(1.25)  # Equation 13


def gelu_equation_9(x: Tensor) -> Tensor:
    """The approximation of GELU that the paper counts, with the square root over 2 / pi alone."""
    return 0.5 * (x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


@dataclass(frozen=True)
class Formula:
    """`written` is what is counted, `fast` what is timed; both are functions of the units, the scale and the bias."""

    source: str
    written: Callable[[Tensor, Tensor, Tensor], Tensor]
    fast: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None


FORMULAS = {
    "ReLU": Formula("Equation 7", lambda x, s, b: torch.relu(x)),
    "GELU (PyTorch)": Formula("Table 11", lambda x, s, b: gelu_equation_9(x), lambda x, s, b: F.gelu(x)),
    BASELINE: Formula("Table 11", lambda x, s, b: gelu_equation_9(x)),
    "Squared ReLU": Formula("Equation 10", lambda x, s, b: torch.relu(x) ** 2),
    "Squared ReLU (Mixlab)": Formula(
        "Equation 10", lambda x, s, b: torch.relu(x) ** 2, lambda x, s, b: squared_relu(x)
    ),
    "StarReLU": Formula("Table 11", star_relu_reference),
    "StarReLU (Mixlab)": Formula("Table 11", star_relu_reference, star_relu),
    "StarReLU, learned scale": Formula("Table 8", lambda x, s, b: s * torch.relu(x) ** 2),
    "StarReLU, learned bias": Formula("Table 8", lambda x, s, b: torch.relu(x) ** 2 + b),
    "StarReLU, constants": Formula("Table 8", lambda x, s, b: SCALE * torch.relu(x) ** 2 + BIAS),
    "StarReLU, constant scale": Formula("Table 8", lambda x, s, b: SCALE * torch.relu(x) ** 2),
    "StarReLU, constant bias": Formula("Table 8", lambda x, s, b: torch.relu(x) ** 2 - 0.5),
}


class FlopCounter(TorchDispatchMode):
    """Adds up elementwise operators per unit: one each, a power one less than its exponent, tanh six."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet is aten.tanh:
            self.flops += TANH
        elif packet is aten.pow:
            self.flops += int(args[1]) - 1
        elif packet in (aten.relu, aten.mul, aten.add, aten.sub, aten.rsub):
            self.flops += 1
        else:
            raise MacsError(f"The FLOPs per unit of {func} are not known, and they are not guessed.")
        return func(*args, **(kwargs or {}))


def flops_per_unit(name: str) -> int:
    """As the paper counts: GELU by Equation 9 in every form."""
    unit, one = torch.ones(1), torch.ones(1)
    with FlopCounter() as counter, torch.no_grad():
        FORMULAS[name].written(unit, one, one)
    return counter.flops


# -- speed ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ActivationRow:
    """`ratio` is how many times as fast as GELU by Equation 9, the median over pairs of runs.

    Times and `runs_per_second` are of one call; a timed run on an accelerator makes many.
    """

    activation: str
    source: str
    flops: int
    units: int
    mode: str
    dtype: str
    compiled: bool
    device: str
    calls: int  # in a timed run
    threads: int
    machine: str
    warmup: int = 0
    repeats: int = 0
    runs_per_second: float | None = None
    best_ms: float | None = None
    median_ms: float | None = None
    spread: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    reason: str = ""


def ready(
    name: str,
    units: int,
    dtype: torch.dtype,
    *,
    training: bool,
    compiled: bool,
    device: torch.device,
) -> Run:
    """One pass over the units; in training with the gradients of the units, and of scale and bias where they are."""
    formula = FORMULAS[name]
    function = formula.fast or formula.written
    if compiled:
        require_compiler(device)
        function = torch.compile(function, dynamic=False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, units, generator=generator).to(device, dtype)
    scale, bias, flow = (torch.full((1,), value, dtype=dtype, device=device) for value in (SCALE, BIAS, 1.0))
    if not training:

        def forward() -> None:
            with torch.inference_mode():
                function(x, scale, bias)

        return forward
    leaves = [tensor.requires_grad_() for tensor in (x, scale, bias)]
    flowing = flow.expand_as(x)

    def step() -> None:
        function(*leaves).backward(flowing)
        for leaf in leaves:
            leaf.grad = None

    return step


def calls_on(device: torch.device) -> int:
    return 1 if device.type == "cpu" else CALLS


def repeated(run: Run, device: torch.device) -> Run:
    """As many calls as `calls_on` says, which end when the device is done."""

    def calls() -> None:
        for _ in range(calls_on(device)):
            run()
        wait_for(device)

    return calls


def bench_activations(
    names: Sequence[str] = (),
    *,
    units: int = UNITS,
    dtype: str = "float32",
    training: bool = False,
    compiled: bool = False,
    device: str = "cpu",
    threads: int | None = None,
    plan: Rounds | None = None,
    watch: Watch | None = None,
) -> tuple[Finding, dict[str, Any]]:
    """All activations, or some of them, in turns. The baseline of the ratios always runs."""
    need("matplotlib.figure")
    for name in names:
        if name not in FORMULAS:
            raise ConfigError(f"Unknown activation {name!r}. {near_misses(name, FORMULAS)}")
    require(dtype in DTYPES and units >= 1, f"a dtype among {', '.join(DTYPES)}, and 1 unit or more; got {dtype!r}.")
    chosen = [name for name in FORMULAS if not names or name in names or name == BASELINE]
    how, used = {"training": training, "compiled": compiled}, plan or Rounds(seconds=1.0, least=20, patience=2.0)
    if dtype == "tf32":
        raise ConfigError("tf32 is of matrix products, and activations have no products of matrices: take float32.")
    chosen_device = choose_device(device, 0)
    check_dtype(dtype, chosen_device)
    with threads_set(threads):
        if watch is not None:
            watch(f"{len(chosen)} activations")
        runs, reasons = {}, {}
        for name in chosen:
            try:
                run = ready(name, units, DTYPES[dtype], **how, device=chosen_device)
                runs[name] = repeated(run, chosen_device)
                runs[name]()
            except Exception as error:  # no compiler, an operator without this dtype
                reasons[name] = reason_of(error)
                runs.pop(name, None)
        calls = calls_on(chosen_device)
        timed = take_turns(runs, used) if runs else {}
        seconds = {name: [one / calls for one in whole] for name, whole in timed.items()}
        about = {"units": units, "mode": "training" if training else "inference", "dtype": dtype, "compiled": compiled}
        about |= {"device": str(chosen_device), "calls": calls}
        rows = [row_of(name, seconds, reasons.get(name, ""), used, about) for name in chosen]
    return report(rows, used)


def row_of(
    name: str, seconds: dict[str, list[float]], reason: str, plan: Rounds, about: dict[str, Any]
) -> ActivationRow:
    found: dict[str, Any] = {"reason": reason}
    if name in seconds:
        timing = Timing.of(seconds[name])
        found |= {"warmup": plan.warmup + 1, "repeats": timing.rounds, "spread": timing.spread}
        found |= {"best_ms": 1e3 * timing.best, "median_ms": 1e3 * timing.median, "runs_per_second": 1 / timing.best}
        if BASELINE in seconds:
            ratio = Ratio.of(seconds[name], seconds[BASELINE])
            found |= {"ratio": ratio.median, "ratio_low": ratio.low, "ratio_high": ratio.high}
    return ActivationRow(
        activation=name,
        source=FORMULAS[name].source,
        flops=flops_per_unit(name),
        threads=torch.get_num_threads(),
        machine=machine_line(),
        **about,
        **found,
    )


def report(rows: Sequence[ActivationRow], plan: Rounds) -> tuple[Finding, dict[str, Any]]:
    ran = [(row.activation, row.runs_per_second, row) for row in rows if row.runs_per_second is not None]
    entries = [(name, speed, f"{speed:,.0f}, FLOPs per unit: {row.flops}") for name, speed, row in ran]
    heading = f"{rows[0].mode}, {rows[0].units:,} units, {rows[0].dtype}"
    colors = colors_of([row.activation for row in rows])
    drawn = {"activations": bars("Activations alone", {heading: entries}, "runs per second", colors)} if ran else {}
    found = finding(
        "bench_activations",
        "Activations alone",
        [field.name for field in fields(ActivationRow)],
        [list(asdict(row).values()) for row in rows],
        settings={"baseline": BASELINE, "plan": asdict(plan), "interrupted": False},
        data={"rows": [asdict(row) for row in rows]},
        pictures=tuple(Picture(name=name, caption="runs per second of the best run") for name in drawn),
    )
    return found, drawn
