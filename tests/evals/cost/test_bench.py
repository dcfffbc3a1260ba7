import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from mixlab.core.errors import ConfigError, MixlabError, PrecisionError
from mixlab.evals.cost import bench as bench_module
from mixlab.evals.cost import bench_case
from mixlab.evals.cost.bench import bench, cases_of, executions_of, reason_of, run_all, threads_set
from mixlab.evals.cost.bench_case import BenchRow, Case, Conditions, timing_of
from mixlab.evals.cost.compile_time import CompileTime
from mixlab.evals.cost.execution import Execution
from mixlab.evals.cost.whole_task import whole_task
from mixlab.evals.subjects import Subject, open_subject
from mixlab.findings.findings import read_finding, write_finding
from mixlab.metrics.timing import Rounds
from mixlab.models.backbone import Backbone
from mixlab.models.weights import save_weights
from mixlab.models.zoo import create_model

QUICK = Rounds(seconds=0.01, least=2, most=2, warmup=1, patience=1.0)
RECORDED = ("machine", "threads", "dtype", "layout", "compiled", "warmup", "repeats", "spread", "device")


def quick(models: list[str], **words: object) -> list[dict[str, object]]:
    settings = {"sizes": [32], "batches": [2], "plan": QUICK, "skip": ["memory"], **words}
    return bench(models, **settings)[0].data["rows"]  # type: ignore[arg-type]


def test_every_row_records_what_it_depends_on() -> None:
    rows = quick(["caformer_pico", "timm:resnet18"], training=True, threads=1)
    assert [(row["model"], row["mode"]) for row in rows] == [
        ("caformer_pico", "inference"),
        ("timm:resnet18", "inference"),
        ("caformer_pico", "training"),
        ("timm:resnet18", "training"),
    ]
    assert [row["hours_10_epochs"] is not None for row in rows] == [False, False, True, True]
    for row in rows:
        assert all(row[name] is not None for name in RECORDED)
        assert row["images_per_second"] == pytest.approx(2e3 / row["best_ms"])  # type: ignore[operator]
        assert (row["threads"], row["repeats"], row["reason"], row["p50_ms"]) == (1, 2, "", None)


def test_one_image_has_latency_percentiles_as_far_as_runs_tell() -> None:
    case = Case(model="m", image_size=(32, 32), batch=1, execution=Execution())
    found = timing_of([float(value) for value in range(1, 101)], case)
    assert (found["p50_ms"], found["p90_ms"], found["p99_ms"]) == (50e3, 90e3, 99e3)
    assert (found["spread"], found["images_per_second"]) == (99.0, 1.0)
    trained = Case(model="m", image_size=(32, 32), batch=1, execution=Execution(training=True))
    assert "p50_ms" not in timing_of([1.0, 2.0], trained)


def test_a_training_step_tells_the_hours_of_ten_epochs_of_imagenet() -> None:
    case = Case(model="m", image_size=(224, 224), batch=128, execution=Execution(training=True))
    found = timing_of([0.1, 0.2], case)
    assert found["hours_10_epochs"] == pytest.approx(10 * 1_281_167 / found["images_per_second"] / 3600)
    assert found["hours_10_epochs"] == pytest.approx(2.78, abs=0.01)
    inference = Case(model="m", image_size=(224, 224), batch=128, execution=Execution())
    assert "hours_10_epochs" not in timing_of([0.1, 0.2], inference)


def test_a_peer_takes_turns_and_gives_a_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fake(runs: dict[str, object], plan: Rounds) -> dict[str, list[float]]:
        seen.append(list(runs))
        return {"own": [1.0, 2.0, 4.0], "peer": [2.0, 4.0, 8.0]}

    monkeypatch.setattr(bench_case, "take_turns", fake)
    (row,) = quick(["caformer_pico"], against="caformer_pico")
    assert seen == [["own", "peer"]]
    assert (row["ratio"], row["ratio_low"], row["ratio_high"], row["ratio_best"]) == (2.0, 2.0, 2.0, 2.0)
    assert row["against"] == "caformer_pico"


def test_the_two_sides_of_a_pair_are_models_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Subject] = []

    def remember(name: str, **words: object) -> Subject:
        opened.append(open_subject(name, **words))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(bench_case, "open_subject", remember)
    quick(["caformer_pico"], against="caformer_pico")
    assert len({id(subject.model) for subject in opened}) == 2


def test_what_cannot_run_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def trap(dtype: torch.dtype) -> bool:
        if dtype is torch.bfloat16:
            raise PrecisionError("bf16 arithmetic ends the process")
        return True

    monkeypatch.setattr("mixlab.evals.cost.execution.check_cpu_dtype", trap)
    monkeypatch.setattr("mixlab.evals.cost.execution.has_compiler", lambda: False)
    rows = quick(["caformer_pico"], dtypes=["bfloat16", "float32"], compiled=True)
    assert [bool(row["images_per_second"]) for row in rows] == [False, False, True, False]
    assert "bf16 arithmetic ends" in str(rows[0]["reason"])
    assert "C++ compiler" in str(rows[3]["reason"])


def test_a_model_that_needs_more_memory_than_is_free_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_case, "peak_memory_mb", lambda *_, **__: 1e9)
    monkeypatch.setattr(bench_case, "take_turns", lambda *_: pytest.fail("it ran"))
    (row,) = quick(["caformer_pico"], skip=[])
    assert str(row["reason"]).startswith("It needs 1000000000 MB, but only ")


def test_memory_is_measured_as_the_case_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def measured(*places: object, **words: dict[str, object]) -> float:
        seen.append((places, words))
        return 12.5

    monkeypatch.setattr(bench_case, "peak_memory_mb", measured)
    rows = quick(["caformer_pico"], skip=[], training=True, optimizer="sgd", layout="channels_last")
    assert [row["peak_mb"] for row in rows] == [12.5, 12.5]
    assert seen[1][0] == ("caformer_pico", (32, 32))
    wanted = {"training": True, "optimizer": "sgd", "layout": "channels_last"}
    assert wanted.items() <= seen[1][1]["execution"].items()


def test_compile_times_are_of_compiled_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_case, "compile_time", lambda *_, **__: CompileTime(30.0, 5.0, 14.0, 3.0, 7))
    monkeypatch.setattr(Execution, "prepare", lambda self, model: model.train(self.training))
    eager, compiled = quick(["caformer_pico"], compiled=True)
    assert (eager["compiled"], eager["compile_cold_s"]) == (False, None)
    names = ("compile_cold_s", "compile_warm_s", "trivial_cold_s", "trivial_warm_s")
    assert [compiled[name] for name in names] == [30.0, 5.0, 14.0, 3.0]


def test_ctrl_c_keeps_the_rows_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(case: Case, conditions: Conditions) -> BenchRow:
        if case.batch == 4:
            raise KeyboardInterrupt
        return bench_case.row_of(case, conditions, images_per_second=1.0, best_ms=1.0, spread=0.0)

    monkeypatch.setattr(bench_module, "measure_case", measure)
    found, figures = bench(["caformer_pico"], sizes=[32], batches=[1, 2, 4, 8], plan=QUICK)
    assert [row["batch"] for row in found.data["rows"]] == [1, 2]
    assert found.settings["interrupted"]
    assert set(figures) == {"throughput"}


def test_ctrl_c_before_the_first_row_is_ctrl_c() -> None:
    def measure(job: int) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all([1, 2], measure, lambda job, why: job, name=str)


def test_jobs_are_told_and_failures_become_rows() -> None:
    told: list[str] = []
    rows, interrupted = run_all(
        [2, 0], lambda job: 2 / job, lambda job, why: why, name=lambda job: f"by {job}", watch=told.append
    )
    assert rows == [1.0, "ZeroDivisionError: division by zero"]
    assert told == ["1/2 by 2", "2/2 by 0"]
    assert not interrupted


def test_reasons_are_one_short_line() -> None:
    assert reason_of(MixlabError("two\nlines")) == "two lines"
    assert reason_of(RuntimeError("x" * 999)).startswith("RuntimeError: xxx")
    assert len(reason_of(RuntimeError("x" * 999))) == 240
    assert reason_of(MemoryError()) == "MemoryError: MemoryError"


def test_settings_come_one_after_the_other_with_all_models() -> None:
    executions = executions_of(["float32"], training=True, compiled=True, layout="contiguous", optimizer="lamb")
    assert [(how.training, how.compiled, how.optimizer) for how in executions] == [
        (False, False, "none"),
        (False, True, "none"),
        (True, False, "lamb"),
        (True, True, "lamb"),
    ]
    cases = cases_of(["a", "b"], [32, (32, 32), 64], [1], executions[:1])
    assert [(case.model, case.image_size) for case in cases] == [
        ("a", (32, 32)),
        ("b", (32, 32)),
        ("a", (64, 64)),
        ("b", (64, 64)),
    ]


@pytest.mark.parametrize(
    ("models", "words", "said"),
    [
        (["caformer_pic"], {}, "Did you mean 'caformer_pico'"),
        (["caformer_pico"], {"against": "timm:resnet1"}, "Did you mean 'resnet18'|timm has no model"),
        (["caformer_pico"], {"dtypes": ["half"]}, "Unknown dtype"),
        (
            ["caformer_pico"],
            {"changes": {"mlp_ratoi": 2}},
            "Unknown model option 'mlp_ratoi'. Did you mean 'mlp_ratio'",
        ),
        (["ensemble_hpx_conv_s18"], {"changes": {"mlp_ratoi": 2}}, "Unknown model option"),
        (["upernet:caformer_pico"], {"changes": {"mixers": "pol"}}, "Unknown mixer 'pol'"),
        (["timm:resnet18"], {"changes": {"mlp_ratio": 2}}, "is not Mixlab's: its model cannot be changed by mlp_ratio"),
        (["caformer_pico"], {"batches": [0]}, "batches of 1 or more"),
        (["caformer_pico"], {"skip": ["sleep"]}, "measurements to skip"),
        ([], {}, "at least one model"),
    ],
)
def test_wrong_words_are_errors_before_anything_runs(
    models: list[str], words: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "measure_case", lambda *_: pytest.fail("it ran"))
    with pytest.raises(ConfigError, match=said):
        bench(models, **words)  # type: ignore[arg-type]


def test_changes_of_the_models_are_measured_and_recorded_and_spare_the_peer() -> None:
    changes = {"mlp_ratio": 1, "drop_path": {"rate": 0.1}}
    settings: dict[str, Any] = {"sizes": [32], "batches": [1], "plan": QUICK, "changes": changes}
    found, _ = bench(["caformer_pico", "linear:caformer_pico"], skip=["memory"], against="timm:resnet18", **settings)
    rows = found.data["rows"]
    plain = quick(["caformer_pico", "linear:caformer_pico"], batches=[1])
    for row, before in zip(rows, plain, strict=True):
        assert (row["reason"], row["changes"]) == ("", 'mlp_ratio=1 drop_path={"rate": 0.1}')
        assert 0 < row["gmacs"] < before["gmacs"]
    assert found.settings["changes"] == changes
    assert {row["changes"] for row in plain} == {""}


@pytest.mark.parametrize("weights", [False, True])
def test_memory_is_that_of_the_changed_model(weights: bool, tmp_path: Path) -> None:
    name = "caformer_pico"
    if weights:
        save_weights(create_model("caformer_pico", mlp_ratio=32, num_classes=10), tmp_path / "w.safetensors")
        name = f"caformer_pico={tmp_path / 'w.safetensors'}"
    (row,) = quick([name], skip=[], changes={"mlp_ratio": 32, "num_classes": 10})
    parameters = create_model("caformer_pico", mlp_ratio=32).parameters()
    assert row["peak_mb"] > sum(one.nbytes for one in parameters) / 2**20  # type: ignore[operator]


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with threads_set(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_a_finding_goes_to_files_and_back(tmp_path: Path) -> None:
    found, figures = bench(["caformer_pico"], sizes=[32], batches=[1], plan=QUICK, skip=["memory"])
    again = read_finding(write_finding(found, tmp_path, figures))
    assert again.plain() == found.plain()
    assert json.loads(json.dumps(again.data)) == again.data
    assert BenchRow(**{**again.data["rows"][0], "image_size": (32, 32)}).plain() == again.data["rows"][0]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["bench.csv", "bench.json", "throughput.png", "throughput.svg"]
    header, row = (tmp_path / "bench.csv").read_text().splitlines()
    assert header.split(",")[:4] == ["model", "mode", "image_size", "batch"]
    assert row.startswith("caformer_pico,inference,32,1,float32,contiguous,False,none,cpu,")
    assert asdict(QUICK).items() <= again.settings["plan"].items()


@pytest.mark.parametrize("head", ["upernet", "linear", "mask_rcnn", "cascade_mask_rcnn", "deformable_detr"])
def test_whole_tasks_have_a_speed_and_macs(head: str) -> None:
    name = f"{head}:convformer_pico"
    row, alone = quick([name, "convformer_pico"], sizes=[(32, 48)], batches=[1])
    assert (row["model"], row["image_size"], row["reason"]) == (name, [32, 48], "")
    assert row["images_per_second"]
    assert row["gmacs"] > alone["gmacs"] > 0  # type: ignore[operator]


@pytest.mark.parametrize(("head", "mixer"), [("mask_rcnn", "window_attention"), ("upernet", "attention")])
def test_a_detector_is_measured_with_the_windows_of_its_paper(head: str, mixer: str) -> None:
    model = whole_task(f"{head}:caformer_pico", (64, 96))
    (backbone,) = (part for part in model.modules() if isinstance(part, Backbone))
    assert backbone.config.mixers[-1].name == mixer


def test_whole_tasks_need_a_known_backbone_and_are_not_trained() -> None:
    with pytest.raises(ConfigError, match="convformer_pico"):
        quick(["upernet:convformer_pic"])
    inference, training = quick(["linear:convformer_pico"], training=True)
    assert not inference["reason"]
    assert "needs objects" in str(training["reason"])


def test_memory_of_a_whole_task_is_that_of_a_child() -> None:
    (row,) = quick(["linear:convformer_pico"], skip=[])
    assert row["peak_mb"] > 1  # type: ignore[operator]


@pytest.mark.parametrize(("skip", "peak"), [((), 12.5), (("memory",), None)])
def test_a_gpu_has_a_peak_of_memory_unless_it_is_skipped(
    skip: tuple[str, ...], peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = open_subject("caformer_pico", image_size=32).model
    monkeypatch.setattr(bench_case, "open_model", lambda *_: (on_cpu, None))
    monkeypatch.setattr(bench_case, "cuda_peak", lambda *_: 12.5)
    case = Case(model="caformer_pico", image_size=(32, 32), batch=2, execution=Execution())
    row = bench_case.measure_case(case, Conditions(device=torch.device("cuda", 0), plan=QUICK, skip=skip))
    assert (row.device, row.peak_mb) == ("cuda:0", peak)


@pytest.mark.parametrize(("dtype", "allowed"), [("tf32", True), ("float32", False)])
def test_products_are_tf32_only_in_rows_that_say_so(dtype: str, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    on_cpu = open_subject("caformer_pico", image_size=32).model

    def measure(runs: dict[str, object], plan: Rounds) -> dict[str, list[float]]:
        seen.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        return {"own": [1.0]}

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(bench_case, "open_model", lambda *_: (on_cpu, None))
    monkeypatch.setattr(bench_case, "take_turns", measure)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    case = Case(model="caformer_pico", image_size=(32, 32), batch=2, execution=Execution(dtype=dtype))
    bench_case.measure_case(case, Conditions(device=torch.device("cuda", 0), plan=QUICK, skip=("memory",)))
    assert seen == [(allowed, allowed)]
    assert before == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    assert {parameter.dtype for parameter in on_cpu.parameters()} == {torch.float32}


def test_a_cpu_says_that_it_has_no_tf32() -> None:
    plain, tf32 = quick(["caformer_pico"], dtypes=["float32", "tf32"])
    assert (plain["reason"], tf32["images_per_second"]) == ("", None)
    assert "tf32 is arithmetic of NVIDIA GPUs" in str(tf32["reason"])
