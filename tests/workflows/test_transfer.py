import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mixlab.cli import main
from mixlab.core.errors import ConfigError, DataError, StoppedEarly, TrainingError
from mixlab.data.vtab import TASKS
from mixlab.training.loop import Trainer
from mixlab.training.run import resume
from mixlab.training.watch import Files
from mixlab.workflows.transfer import Summary, TransferResult, average_row, averages, transfer, transfer_all
from tests.data.make import vtab
from tests.training.tiny import OPTIONS

QUIET: dict[str, Any] = {"workers": 0, "tensorboard": False, "progress": False, "device": "cpu", "options": OPTIONS}
SWEEP: dict[str, Any] = {"sweep.lr": [1e-2, 1e-5], "sweep.seeds": 2, "schedule.epochs": 2, "schedule.warmup_epochs": 0}
SWEEP |= {"image_size": 32, "precision": "float32", "batch_size": 4}
WEIGHTS, STATES = ("best.safetensors", "final.safetensors"), ("last.ckpt", "previous.ckpt")
# Vision-LSTM, Table 8, and what Table 3 makes of it
TABLE_8 = [54.2, 90.2, 67.4, 90.7, 89.9, 81.6, 41.1, 83.4, 94.2, 82.7, 73.1]
TABLE_8 += [80.7, 61.8, 49.4, 81.3, 57.8, 51.8, 31.4, 34.8]
TABLE_3 = {"natural": 73.6, "specialized": 83.4, "structured": 56.1, "average": 68.3}


def results(count: int) -> tuple[TransferResult, ...]:
    """The first tasks of ViL-T's row in Table 8."""
    named = list(zip(TASKS, TABLE_8, strict=True))[:count]
    return tuple(TransferResult(f"vtab/{task}:data", 1e-3, {}, (mean,), mean) for task, mean in named)


def files(folder: Path, pattern: str) -> set[str]:
    return {path.name for run in folder.glob(pattern) for path in run.iterdir() if path.is_file()}


# -- one dataset -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TransferResult]:
    """A transfer that nothing disturbs; tests only read it."""
    folder = tmp_path_factory.mktemp("transfer")
    changes = {**SWEEP, "batch_size": 128}
    return folder / "out", transfer("caformer_pico", "digits", out=folder / "out", changes=changes, **QUIET)


def test_a_transfer_sweeps_on_val_and_tests_the_best(whole: tuple[Path, TransferResult]) -> None:
    out, result = whole
    assert result.lr == 1e-2
    assert result.val["0.01"] > result.val["1e-05"]
    assert len(result.test) == 2
    assert result.mean == pytest.approx(sum(result.test) / 2)
    assert json.loads((out / "transfer.json").read_text())["lr"] == 1e-2
    final = json.loads((out / "train-val" / "lr0.01" / "seed0" / "config.json").read_text())
    assert final["train_splits"] == ["train", "val"]


def test_runs_of_the_sweep_leave_results_and_tested_runs_their_weights(whole: tuple[Path, TransferResult]) -> None:
    out, _ = whole
    assert files(out / "train", "*/*") == {"config.json", "result.json", "metrics.csv", "metrics.json"}
    assert files(out / "train-val", "*/*") - files(out / "train", "*/*") == {"final.safetensors"}


def test_a_finished_transfer_trains_nothing_again(
    whole: tuple[Path, TransferResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, result = whole
    monkeypatch.setattr(Trainer, "fit", lambda trainer: pytest.fail("a finished run was trained again"))
    assert transfer("caformer_pico", "digits", out=out, changes={**SWEEP, "batch_size": 128}, **QUIET) == result
    again = resume(out / "train" / "lr0.01" / "seed0", progress=False)
    assert again.history[-1]["top1"] > 0
    assert again.model is None


def test_tested_runs_keep_no_weights_if_only_results_are_wanted(tmp_path: Path) -> None:
    data = f"vtab/svhn:{vtab(tmp_path / 'data', ['svhn'])}"
    changes = {**SWEEP, "sweep.lr": [1e-2], "sweep.seeds": 1}
    words: dict[str, Any] = {"out": tmp_path / "out", "changes": changes, **QUIET}
    result = transfer("caformer_pico", data, keep="results", **words)
    assert not files(tmp_path / "out", "*/*/*") & {*WEIGHTS, *STATES}
    assert transfer("caformer_pico", data, keep="results", **words) == result
    with pytest.raises(TrainingError, match="holds a run with another keep"):
        transfer("caformer_pico", data, keep="final", **words)
    with pytest.raises(ConfigError, match=r"'keep' of the run must be one of 'all', 'final', 'results'"):
        transfer("caformer_pico", data, keep="weights", **{**words, "out": tmp_path / "other"})  # type: ignore[arg-type]


def test_what_a_kill_left_of_a_finished_run_is_removed_by_the_next_call(tmp_path: Path) -> None:
    data = f"vtab/svhn:{vtab(tmp_path / 'data', ['svhn'])}"
    changes = {**SWEEP, "sweep.lr": [1e-2], "sweep.seeds": 1}
    words: dict[str, Any] = {"out": tmp_path / "out", "changes": changes, **QUIET}
    result = transfer("caformer_pico", data, **words)
    run = tmp_path / "out" / "train" / "lr0.01" / "seed0"
    for name in ("last.ckpt", "final.safetensors", ".last.ckpt.123"):
        (run / name).write_bytes(b"half")
    assert transfer("caformer_pico", data, **words) == result
    assert not files(run.parent, "*") & {"last.ckpt", "final.safetensors", ".last.ckpt.123"}


def test_a_transfer_needs_three_splits_and_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no sweep"):
        transfer("caformer_pico", "digits", out=tmp_path / "out", recipe="digits")
    with pytest.raises(DataError, match="does not exist"):
        transfer("caformer_pico", tmp_path / "nowhere", out=tmp_path / "out")


def test_the_protocol_says_what_each_run_trains_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With val in the training of a sweep, the learning rate would be chosen on the test split."""
    with pytest.raises(ConfigError, match="train_splits cannot be chosen"):
        transfer("caformer_pico", "digits", out=tmp_path / "out", train_splits=("train", "val"), **QUIET)
    with pytest.raises(SystemExit):
        main(["transfer", "caformer_pico", "--out", str(tmp_path / "out"), "--train-splits", "train", "val"])
    assert "--train-splits" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -- cut off ---------------------------------------------------------------------------------------


def test_a_sweep_that_is_stopped_goes_on_to_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the second run of the sweep; the first is not trained again."""
    data = f"vtab/svhn:{vtab(tmp_path / 'data', ['svhn'])}"
    words: dict[str, Any] = {"changes": {**SWEEP, "sweep.seeds": 1, "schedule.epochs": 8}, **QUIET}
    whole = transfer_all("caformer_pico", [data], out=tmp_path / "whole", **words)
    started: list[Path] = []

    def stop(watcher: Files, run: Trainer, loss: float, lr: float) -> None:
        if len(started) == 2 and run.update == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Files, "start", lambda watcher, run: started.append(run.folder))
    monkeypatch.setattr(Files, "update", stop)
    with pytest.raises(StoppedEarly, match=r"0 of 1 datasets are finished\. The same command goes on"):
        transfer_all("caformer_pico", [data], out=tmp_path / "out", **words)
    assert len(started) == 2
    assert transfer_all("caformer_pico", [data], out=tmp_path / "out", **words) == whole
    assert started[2] == started[1]
    assert len(started) == 4  # the second once more, and the one that is tested
    runs = [
        json.loads(path.read_text())["history"] for path in sorted(tmp_path.glob("*/*/train/lr1e-05/*/result.json"))
    ]
    assert [row["train_loss"] for row in runs[0]] == [row["train_loss"] for row in runs[1]]


def test_a_transfer_that_is_killed_goes_on(tmp_path: Path) -> None:
    data, out = vtab(tmp_path / "data", ["svhn", "dtd"]), tmp_path / "out"
    words = ["transfer", "caformer_pico", "--data", f"vtab:{data}", "--out", str(out), "--no-tensorboard"]
    words += ["--workers", "0", "--device", "cpu", "--model-set", "dims=[8,16,16,16]", "depths=[1,1,1,1]"]
    words += ["--set", "sweep.lr=[1e-2,1e-3]", "sweep.seeds=1", "image_size=32", "precision=float32", "batch_size=4"]
    words += ["schedule.warmup_epochs=0", "--epochs", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    process = subprocess.Popen([sys.executable, "-m", "mixlab", *words], **quiet)
    deadline = time.monotonic() + 120
    while not list(out.glob("*/train/*/*/result.json")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the transfer was over before it could be killed"
    done = {path: path.stat().st_mtime_ns for path in out.glob("*/*/*/*/result.json")}
    assert main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert len(list(out.glob("*/*/*/*/result.json"))) == 6
    assert not list(out.rglob("*.ckpt"))
    assert len(json.loads((out / "summary.json").read_text())["results"]) == 2


# -- all of VTAB-1K --------------------------------------------------------------------------------


def test_all_tasks_below_a_folder_are_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = vtab(tmp_path / "data", ["svhn", "cifar"]), tmp_path / "out"
    (data / "notes").mkdir()
    words = ["transfer", "caformer_pico", "--data", f"vtab:{data}", "--out", str(out), "--no-tensorboard"]
    words += ["--workers", "0", "--device", "cpu", "--model-set", "dims=[8,16,16,16]", "depths=[1,1,1,1]"]
    words += ["--set", "sweep.lr=[1e-2]", "sweep.seeds=1", "image_size=32", "precision=float32", "batch_size=4"]
    words += ["schedule.warmup_epochs=0", "--epochs", "1", "--keep", "results"]
    assert main(words) == 0
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert "2 of 19 tasks of VTAB-1K, so there is no average" in text
        assert (
            "natural: caltech101, dtd, oxford_flowers102, oxford_iiit_pet, sun397; specialized: patch_camelyon" in text
        )
    assert "2 of 7" in printed.out
    assert "0 of 4" in printed.out
    assert [path.name for path in sorted(out.iterdir())] == ["summary.json", "vtab-cifar", "vtab-svhn"]
    summary = json.loads((out / "summary.json").read_text())
    assert [row["data"] for row in summary["results"]] == [f"vtab/cifar:{data}", f"vtab/svhn:{data}"]
    assert summary["averages"] == {}
    assert len(summary["missing"]["structured"]) == 8


def test_everything_that_is_wrong_with_the_data_is_said_before_training(tmp_path: Path) -> None:
    data, out = vtab(tmp_path / "data", ["svhn", "cifar", "kitti"]), tmp_path / "out"
    (data / "kitti" / "val200.txt").unlink()
    with pytest.raises(DataError, match=r"kitti.* has no val"):
        transfer_all("caformer_pico", [f"vtab:{data}"], out=out)
    (data / "kitti" / "val200.txt").write_text("images/0.png 4")
    with pytest.raises(DataError, match=r"Line 1 of .*kitti.*label under 4"):
        transfer_all("caformer_pico", [f"vtab:{data}"], out=out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"No task of VTAB-1K was found below .*one folder per task"):
        transfer_all("caformer_pico", [f"vtab:{tmp_path / 'empty'}"], out=out)
    with pytest.raises(ConfigError, match="more than one would write into vtab-svhn"):
        transfer_all("caformer_pico", [f"vtab/svhn:{data}", f"vtab:{data}"], out=out)
    assert not out.exists()


def test_the_means_of_table_3_are_those_of_the_datasets_of_table_8() -> None:
    found = averages(results(19))
    assert found == pytest.approx(TABLE_3, abs=0.051)  # of figures that are rounded themselves
    categories = [mean for name, mean in found.items() if name != "average"]
    assert statistics.fmean(categories) > TABLE_3["average"] + 2


def test_an_incomplete_category_has_no_mean_and_incomplete_data_no_average() -> None:
    summary = Summary("vil_tiny", results(10))
    assert {name: round(mean, 1) for name, mean in summary.averages.items()} == {"natural": 73.6}
    assert summary.missing["specialized"] == ["diabetic_retinopathy"]
    header, row = average_row(summary)
    assert header == ["model", "natural", "specialized", "structured", "average"]
    assert row == ["vil_tiny", "73.59", "3 of 4", "0 of 8", "10 of 19"]
    assert average_row(Summary("vil_tiny", results(19)))[1][-1] == "68.29"


def test_other_datasets_have_their_own_average_and_none_of_vtab() -> None:
    others = [TransferResult(name, 1e-3, {}, (mean,), mean) for name, mean in (("digits", 90.0), ("pets", 70.0))]
    assert averages(others) == {"average": 80.0}
    assert averages([*results(19), *others]) == averages(results(19))
    assert Summary("vil_tiny", tuple(others)).missing == {}
