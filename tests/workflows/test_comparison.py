from pathlib import Path
from typing import Any

import pytest
import torch

from mixlab.core.errors import ConfigError, TrainingError
from mixlab.report import Budget, recommend
from mixlab.workflows.comparison import compare, decide
from tests.training.tiny import CHANGES, OPTIONS

QUIET: dict[str, Any] = {"workers": 0, "tensorboard": False, "progress": False, "device": "cpu", "options": OPTIONS}


def test_models_are_compared_alike_and_a_second_call_trains_nothing_again(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"out": tmp_path / "out", "recipe": "digits", "seeds": 2, "changes": CHANGES, **QUIET}
    names = ["convformer_pico", "caformer_pico"]
    result = compare(names, "digits", measure=False, **arguments)
    assert [model.name for model in result.models] == names
    assert all(len(model.top1) == 2 and len(model.curves[0]) == 2 for model in result.models)
    steps = [3 * 2 * model.macs * 1078 * 2 for model in result.models]  # forward and backward, images, epochs
    assert [model.train_flops for model in result.models] == pytest.approx(steps)
    assert result.test_images == 359
    assert {"comparison.json", "comparison.csv", "comparison.html"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    states = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("last.ckpt")}
    again = compare(names, "digits", measure=False, **arguments)
    assert [model.top1 for model in again.models] == [model.top1 for model in result.models]
    assert {path: path.stat().st_mtime_ns for path in states} == states
    smallest = min(result.models, key=lambda model: model.params)
    chosen = recommend(decide(tmp_path / "out", Budget(max_params=smallest.params + smallest.frozen))).chosen
    assert chosen == smallest.name


def test_a_comparison_measures_what_models_cost(tmp_path: Path) -> None:
    changes = {**CHANGES, "schedule.epochs": 1, "schedule.warmup_epochs": 0}
    result = compare(["caformer_pico"], "digits", out=tmp_path / "out", recipe="digits", changes=changes, **QUIET)
    (model,) = result.models
    assert model.images_per_second is not None
    assert model.latency_ms is not None
    assert model.peak_mb is not None
    assert min(model.images_per_second, model.latency_ms, model.peak_mb) > 0


def test_a_comparison_fails_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No model matches 'nothing'"):
        compare(["caformer_pico", "nothing"], "digits", out=tmp_path / "out")
    with pytest.raises(ConfigError, match="Unknown key"):
        compare(["caformer_pico"], "digits", out=tmp_path / "out", changes={"lr": 1})
    with pytest.raises(ConfigError, match="keep = 'all' or 'final'"):
        compare(["caformer_pico"], "digits", out=tmp_path / "out", keep="results")
    assert not (tmp_path / "out").exists()


def test_models_that_train_side_by_side_end_as_alone_also_when_another_fails(tmp_path: Path) -> None:
    words: dict[str, Any] = {"recipe": "digits", "changes": {"schedule.epochs": 1, "schedule.warmup_epochs": 0}}
    words |= {"measure": False, "progress": False, "workers": 0, "tensorboard": False}
    words["options"] = {"dims": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}  # not for a model of one stage
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = compare(["caformer_pico", "convformer_pico"], "digits", out=tmp_path / "alone", **words)
    finally:
        torch.set_num_threads(threads)
    names = ["caformer_pico", "vil_pico", "convformer_pico"]
    with pytest.raises(TrainingError, match="vil_pico"):
        compare(names, "digits", out=tmp_path / "both", jobs=2, **words)
    assert len(list((tmp_path / "both").glob("*/seed0/final.safetensors"))) == 2
    both = compare(["caformer_pico", "convformer_pico"], "digits", out=tmp_path / "both", jobs=2, **words)
    assert [model.top1 for model in both.models] == [model.top1 for model in alone.models]
