from dataclasses import replace

import pytest
import torch

from mixlab.core.errors import ConfigError, PrecisionError, TrainingError
from mixlab.core.grid import Grid
from mixlab.evals.cost import bench_mixers as module
from mixlab.evals.cost.bench_mixers import MixerConditions, bench_mixers, guard, measure_mixer, scalings, start_row
from mixlab.evals.cost.mixer_alone import Alone, count_mixer, estimate_bytes, grid_of, label_of, parse_mixer
from mixlab.evals.cost.scaling import exponent
from mixlab.evals.cost.shadow_memory import PeakCounter
from mixlab.metrics.timing import Rounds
from mixlab.models.mixers import MIXERS

QUICK = Rounds(seconds=0.01, least=2, most=2, warmup=1)
LENGTHS = (1024, 4096, 16384, 65536)


def macs_exponent(entry: object) -> float:
    found = exponent({length: count_mixer(entry, length, 64)[0] for length in LENGTHS})  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("mixer", ["mlstm", "rnn1d", "rnn2d", "convattention", "sepconv", "window_attention"])
def test_arithmetic_is_linear_in_the_tokens(mixer: str) -> None:
    assert macs_exponent(mixer) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("mixer", ["attention", {"name": "mlstm", "form": "parallel"}])
def test_arithmetic_is_quadratic_in_the_tokens(mixer: object) -> None:
    assert macs_exponent(mixer) == pytest.approx(2.0, abs=0.02)


@pytest.mark.parametrize("mixer", ["hyena", "hyena_bidirectional", "hyena_pixel"])
def test_hyena_is_linear_but_for_the_logarithm_of_its_transforms(mixer: str) -> None:
    counts = {length: count_mixer(mixer, length, 64) for length in LENGTHS}
    assert exponent({length: macs - fourier for length, (macs, fourier) in counts.items()}) == pytest.approx(
        1, abs=0.01
    )
    transforms = exponent({length: fourier for length, (_, fourier) in counts.items()})
    assert transforms is not None
    assert 1.06 < transforms < 1.12  # N log N has a slope of 1 + 1 / ln N
    assert 1.0 < macs_exponent(mixer) < 1.03


def test_attention_counts_what_its_formula_says() -> None:
    tokens, dim = 64, 32
    assert count_mixer("attention", tokens, dim) == (4 * tokens * dim**2 + 2 * tokens**2 * dim, 0)


@pytest.mark.parametrize("mixer", [name for name in MIXERS.names() if name != "random"])
def test_every_mixer_runs_alone(mixer: str) -> None:
    alone = Alone(parse_mixer(mixer), 16, Grid(4, 6)).eval()
    assert alone(torch.randn(2, 24, 16)).shape == (2, 24, 16)


def test_both_branches_of_a_parallel_mixer_count() -> None:
    both, one = {"name": "mlstm", "concurrency": "parallel"}, "mlstm"
    assert count_mixer(both, 64, 32)[0] == 2 * count_mixer(one, 64, 32)[0]
    assert label_of(both) == "mlstm concurrency=parallel"


@pytest.mark.parametrize(("length", "sides"), [(1024, (32, 32)), (2048, (32, 64)), (12, (3, 4)), (1, (1, 1))])
def test_grids_are_as_square_as_can_be(length: int, sides: tuple[int, int]) -> None:
    assert grid_of(length)[:2] == sides


def test_a_length_without_a_grid_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"1021 tokens make no grid .* Take 1024\."):
        grid_of(1021)


def test_the_peak_counts_what_lives_at_the_same_time() -> None:
    with PeakCounter() as counter:
        one = torch.empty(1000, device="meta")
        two = one + 1
        three = two * 2
        del one, two
        four = three.view(10, 100) + 1  # a view holds nothing of its own
        four.add_(1)
    assert counter.peak == 3 * 4000


def test_attention_of_many_tokens_is_not_run_where_it_may_not_fit() -> None:
    gigabytes = 2**30
    conditions = MixerConditions(lengths=(64, 65536), plan=QUICK, free_bytes=lambda: 24 * gigabytes)
    assert estimate_bytes("attention", 65536, 64, 1) > 65536**2 * 4
    small, large = measure_mixer("attention", conditions)
    assert small.best_ms is not None
    assert large.best_ms is None
    assert large.reason.startswith("not run: it may need ")
    assert large.macs == count_mixer("attention", 65536, 64)[0]


def test_a_run_that_will_take_too_long_is_not_run() -> None:
    conditions = MixerConditions(limit_seconds=10.0)
    row = start_row("attention", 4096, conditions)
    macs = row.macs or 0
    assert guard(row, "attention", conditions, (macs // 4, 2.0)).reason == ""
    told = guard(row, "attention", conditions, (macs // 4, 3.0)).reason
    assert told == "not run: one run may take 12 s, more than 10 s"


def test_a_mixer_that_refuses_a_length_says_why() -> None:
    rows = measure_mixer("random", MixerConditions(lengths=(64, 16384), plan=QUICK))
    assert rows[0].best_ms is not None
    assert "limit is 4096 tokens" in rows[1].reason


def test_exponents_are_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    row = start_row("hyena_pixel", 64, MixerConditions())
    rows = [replace(row, length=size, best_ms=size**1.5, macs=size**2, fourier_macs=size) for size in (64, 256, 1024)]
    (found,) = scalings(rows)
    assert [found.time, found.macs, found.fourier] == pytest.approx([1.5, 2.0, 1.0])
    assert found.logarithmic == pytest.approx(1 / 1024)
    assert found.told(found.time) == "hyena_pixel: N^1.50, log N in 0% of MACs"


def test_all_mixers_make_one_finding() -> None:
    found, figures = bench_mixers(["pool", "sepconv"], lengths=[16, 64], dim=8, plan=QUICK, threads=1)
    assert [(row["mixer"], row["length"]) for row in found.data["rows"]] == [
        *(("pool", 16), ("pool", 64)),
        *(("sepconv", 16), ("sepconv", 64)),
    ]
    assert all(row["best_ms"] > 0 and row["repeats"] == 2 and row["machine"] for row in found.data["rows"])
    assert [one["mixer"] for one in found.data["scaling"]] == ["pool", "sepconv"]
    assert set(figures) == {"mixers"}


def test_ctrl_c_keeps_the_mixers_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(entry: object, conditions: MixerConditions) -> list[object]:
        if entry == "sepconv":
            raise KeyboardInterrupt
        return real(entry, conditions)  # type: ignore[arg-type, return-value]

    real = module.measure_mixer
    monkeypatch.setattr(module, "measure_mixer", measure)
    found, _ = bench_mixers(["pool", "sepconv"], lengths=[16], dim=8, plan=QUICK)
    assert [row["mixer"] for row in found.data["rows"]] == ["pool"]
    assert found.settings["interrupted"]


@pytest.mark.parametrize(
    ("mixers", "words", "said"),
    [(["atention"], {}, "Did you mean 'attention'"), (["pool"], {"lengths": [7]}, "make no grid"), ([], {}, "mixers")],
)
def test_wrong_words_are_errors(mixers: list[str], words: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bench_mixers(mixers, **words)  # type: ignore[arg-type]


def test_mixers_run_on_the_device_and_wait_for_it_after_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    devices: list[str] = []
    forward = Alone.forward

    def remember(self: Alone, tokens: torch.Tensor) -> torch.Tensor:
        devices.extend(tensor.device.type for tensor in (tokens, *self.parameters()))
        return forward(self, tokens)

    monkeypatch.setattr(Alone, "forward", remember)
    monkeypatch.setattr(module, "wait_for", waited.append)
    (row,) = measure_mixer("sepconv", MixerConditions(lengths=(16,), dim=8, device=torch.device("meta"), plan=QUICK))
    assert (row.device, row.reason, set(devices)) == ("meta", "", {"meta"})
    assert waited == [torch.device("meta")] * (1 + QUICK.warmup + row.repeats)


def test_the_device_of_mixers_is_checked_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "measure_mixer", lambda *_: pytest.fail("it ran"))
    with pytest.raises(TrainingError, match="no CUDA device"):
        bench_mixers(["pool"], device="cuda")


def test_a_dtype_that_ends_the_process_is_an_error_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def trap(dtype: torch.dtype) -> bool:
        raise PrecisionError(f"{dtype} ends the process")

    monkeypatch.setattr("mixlab.evals.cost.execution.check_cpu_dtype", trap)
    monkeypatch.setattr(module, "measure_mixer", lambda *_: pytest.fail("it ran"))
    with pytest.raises(PrecisionError, match="bfloat16 ends the process"):
        bench_mixers(["pool"], dtype="bfloat16")


def test_mixers_in_tf32_need_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure_mixer", lambda *_: pytest.fail("it ran"))
    with pytest.raises(PrecisionError, match="this device is cpu"):
        bench_mixers(["pool"], dtype="tf32")


def test_mixers_are_timed_with_tf32_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr("mixlab.evals.cost.execution.check_tf32", lambda device: None)
    monkeypatch.setattr("mixlab.evals.cost.bench_mixers.choose_device", lambda name, rank: torch.device("cuda", 0))

    def measure(entry: object, conditions: MixerConditions) -> list[object]:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return [start_row(entry, 16, conditions)]  # type: ignore[arg-type]

    monkeypatch.setattr(module, "measure_mixer", measure)
    bench_mixers(["pool"], lengths=[16], dim=8, dtype="tf32", device="cuda")
    bench_mixers(["pool"], lengths=[16], dim=8, dtype="float32", device="cuda")
    assert seen == [True, False]
