"""Which splits a run trains on, and what it may then be judged by."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mixlab.cli import main
from mixlab.core.errors import ConfigError, DataError, MixlabError
from mixlab.training.recipe import load_recipe
from mixlab.training.run import RunResult, finished, resume, train
from mixlab.workflows.comparison import compare
from tests.training.tiny import OPTIONS, dark_and_bright, tiny

SETTINGS: dict[str, Any] = {"options": OPTIONS, "workers": 0, "tensorboard": False, "progress": False, "device": "cpu"}
CHANGES: dict[str, Any] = {"batch_size": 4, "schedule.epochs": 2, "schedule.warmup_epochs": 0, "image_size": 32}


def folder_run(data: Path, out: Path, **settings: Any) -> RunResult:
    return train(
        "caformer_pico", data, out=out, recipe="from_scratch_small", changes=CHANGES, **{**SETTINGS, **settings}
    )


def files_of(run: RunResult) -> set[str]:
    return {path.name for path in run.folder.iterdir()}


@pytest.mark.parametrize("how", ["recipe", "setting"])
def test_a_run_on_train_and_val_learns_from_both_and_chooses_nothing(tmp_path: Path, how: str) -> None:
    if how == "recipe":
        run = tiny(tmp_path / "run", changes={"train_splits": ["train", "val"]})
    else:
        run = tiny(tmp_path / "run", train_splits=("train", "val"))
    updates = json.loads((run.folder / "config.json").read_text())
    assert updates["train_splits"] == ["train", "val"]
    assert run.evaluated_on == "test"
    assert run.history[-1]["images"] == 359
    assert (run.best, run.test) == (None, None)
    assert "best.safetensors" not in files_of(run)
    back = finished(run.folder)
    assert back is not None
    assert back.evaluated_on == "test"


def test_a_run_on_train_alone_is_judged_as_before(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run")
    assert run.evaluated_on == "val"
    assert run.best is not None
    assert run.test is not None


def test_flowers_are_trained_on_2040_images_of_two_splits() -> None:
    assert load_recipe("sequencer_transfer_flowers", model="sequencer2d_s").train_splits == ("train", "val")
    assert load_recipe("sequencer_transfer", model="sequencer2d_s").train_splits == ("train",)


def test_training_images_alone_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = dark_and_bright(tmp_path / "data")
    shutil.rmtree(data / "val")
    run = folder_run(data, tmp_path / "run")
    assert (run.evaluated_on, run.best, run.test) == (None, None, None)
    assert [row["epoch"] for row in run.history] == [1, 2]
    assert "top1" not in run.history[-1]
    assert {"final.safetensors", "metrics.csv"} <= files_of(run)
    assert "best.safetensors" not in files_of(run)
    assert resume(run.folder, progress=False).evaluated_on is None
    words = ["train", "caformer_pico", str(data), "--out", str(tmp_path / "shell"), "--device", "cpu", "--workers", "0"]
    small = ["--set", "batch_size=4", "image_size=32", "schedule.warmup_epochs=0", "--epochs", "1", "--no-tensorboard"]
    assert main([*words, *small]) == 0
    assert "no split was left to evaluate on" in capsys.readouterr().out
    with pytest.raises(DataError, match="no val or test split"):
        compare(["caformer_pico"], data, out=tmp_path / "compared", changes=CHANGES, **SETTINGS)


def test_train_and_val_without_a_test_split_leave_nothing_to_judge_by(tmp_path: Path) -> None:
    run = folder_run(dark_and_bright(tmp_path / "data"), tmp_path / "run", train_splits=("train", "val"))
    assert (run.evaluated_on, run.best) == (None, None)


@pytest.mark.parametrize("names", [(), ("test",), ("train", "train")])
def test_splits_that_cannot_be_trained_on_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="train, val or both"):
        tiny(tmp_path / "run", train_splits=names)
    with pytest.raises(MixlabError, match="train_splits"):
        load_recipe("digits", changes={"train_splits": list(names)})
    assert not (tmp_path / "run").exists()


def test_the_shell_takes_both_splits_and_says_which_was_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "caformer_pico", "digits", "--recipe", "digits", "--out", str(tmp_path / "run")]
    small = ["--epochs", "1", "--device", "cpu", "--workers", "0", "--no-tensorboard"]
    narrow = ["--set", "schedule.warmup_epochs=0", "--model-set", "dims=[8,16,16,16]", "depths=[1,1,1,1]"]
    assert main([*words, "--train-splits", "train", "val", *small, *narrow]) == 0
    told = capsys.readouterr().out
    assert told.startswith("test top-1")
    assert "best" not in told
