import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mixlab
from mixlab.core.errors import ConfigError, DataError, MixlabError, TrainingError
from mixlab.training.loop import Callback, Trainer
from mixlab.training.recipe import list_recipes, load_recipe
from mixlab.training.run import RunResult, read_config, repeat, require_same_run, resume, train
from tests.training.tiny import CHANGES, OPTIONS, Interrupt, dark_and_bright, same_weights, tiny, weights

WEIGHTS = ("best.safetensors", "final.safetensors")
ONE_UPDATE: dict[str, Any] = {"schedule.epochs": None, "schedule.updates": 1, "schedule.warmup_epochs": 0}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run that nothing disturbs; tests only read it."""
    return tiny(tmp_path_factory.mktemp("runs") / "whole")


def test_a_run_learns_and_leaves_everything_behind(tmp_path: Path) -> None:
    result = tiny(tmp_path / "run", changes={"schedule.epochs": 6, "optimizer.lr": 1e-2}, tensorboard=True)
    assert result.test is not None
    assert result.test["top1"] > 60
    assert result.test["images"] == 359
    names = {path.name for path in (tmp_path / "run").iterdir()}
    files = {"config.json", "metrics.csv", "metrics.json", "result.json", "last.ckpt", "tensorboard"}
    assert files | {"best.safetensors", "final.safetensors"} <= names
    history = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert [row["epoch"] for row in history] == [1, 2, 3, 4, 5, 6]
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    model = mixlab.create_model(weights=tmp_path / "run" / "final.safetensors")
    assert model.class_names == tuple(str(digit) for digit in range(10))


def test_equal_seeds_give_equal_weights_and_others_do_not(tmp_path: Path, whole: RunResult) -> None:
    assert same_weights(tiny(tmp_path / "same", seed=0), whole)
    assert not same_weights(tiny(tmp_path / "other", seed=2), whole)
    assert same_weights(repeat(whole.folder / "config.json", tmp_path / "again", progress=False), whole)


CHANCE = {"ema_decay": 0.9, "augmentation.mixup": 0.8, "drop_path": 0.2}


@pytest.fixture(scope="module")
def whole_with_chance(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return tiny(tmp_path_factory.mktemp("runs") / "chance", changes=CHANCE)


@pytest.mark.parametrize(("update", "number"), [(3, signal.SIGINT), (8, signal.SIGTERM), (11, signal.SIGINT)])
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, update: int, number: int, whole_with_chance: RunResult
) -> None:
    stopped = tiny(tmp_path / "cut", changes=CHANCE, callbacks=[Interrupt(update, number)])
    assert stopped.stopped
    assert not (tmp_path / "cut" / "result.json").exists()
    ended = resume(tmp_path / "cut", progress=False)
    assert not ended.stopped
    assert same_weights(ended, whole_with_chance)
    losses = [[row["train_loss"] for row in run.history] for run in (ended, whole_with_chance)]
    assert losses[0] == losses[1]


def test_a_run_that_was_killed_before_it_saved_anything_starts_again(tmp_path: Path, whole: RunResult) -> None:
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_bytes((whole.folder / "config.json").read_bytes())
    assert same_weights(resume(tmp_path / "cut", progress=False), whole)


def test_a_run_that_was_killed_while_it_wrote_its_config_starts_again(tmp_path: Path) -> None:
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / ".config.json.x7a").write_text("{")
    assert tiny(tmp_path / "cut", changes=ONE_UPDATE).history


@pytest.mark.parametrize(
    ("keep", "kept"), [("final", {"final.safetensors"}), ("results", set()), ("all", {"last.ckpt", *WEIGHTS})]
)
def test_a_finished_run_leaves_what_it_was_told_to_keep(tmp_path: Path, keep: str, kept: set[str]) -> None:
    tiny(tmp_path / "run", changes=ONE_UPDATE, keep=keep)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.json", "result.json", "metrics.csv", "metrics.json"} | kept


def test_a_run_that_is_stopped_keeps_its_state_until_it_is_finished(tmp_path: Path) -> None:
    assert tiny(tmp_path / "cut", keep="results", callbacks=[Interrupt(3)]).stopped
    assert (tmp_path / "cut" / "last.ckpt").exists()
    assert resume(tmp_path / "cut", progress=False).history[-1]["epoch"] == 2
    assert not (tmp_path / "cut" / "last.ckpt").exists()


def test_a_config_of_any_name_is_the_one_that_is_repeated(tmp_path: Path, whole: RunResult) -> None:
    shutil.copytree(whole.folder, tmp_path / "first")
    other = json.loads((tmp_path / "first" / "config.json").read_text()) | {"seed": 4}
    (tmp_path / "first" / "other.json").write_text(json.dumps(other))
    second = repeat(tmp_path / "first" / "other.json", tmp_path / "second", progress=False)
    assert not same_weights(whole, second)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="exists and is not empty"):
        repeat(tmp_path / "first", tmp_path / "file", progress=False)


def test_half_precision_trains_on_a_cpu(tmp_path: Path) -> None:
    """On few images: a CPU convolves in it some ten times slower than in float32."""
    changes = {"precision": "float16", "batch_size": 4, "schedule.epochs": 8, "schedule.warmup_epochs": 1}
    settings: dict[str, Any] = {"workers": 0, "tensorboard": False, "progress": False, "device": "cpu"}
    data = dark_and_bright(tmp_path / "data")
    settings |= {"recipe": "digits", "changes": changes, "options": OPTIONS}
    result = train("caformer_pico", data, out=tmp_path / "run", **settings)
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


def test_watchers_hear_the_end_of_a_run_that_fails(tmp_path: Path) -> None:
    heard: list[str] = []

    class Fails(Callback):
        def update(self, run: Trainer, loss: float, lr: float) -> None:
            raise RuntimeError("mine")

        def end(self, run: Trainer) -> None:
            heard.append("end")

    with pytest.raises(RuntimeError, match="mine"):
        tiny(tmp_path / "run", callbacks=[Fails()])
    assert heard == ["end"]


def test_accumulated_steps_are_the_same_update(tmp_path: Path) -> None:
    whole, parts = (tiny(tmp_path / str(micro), micro=micro, changes={"schedule.epochs": 1}) for micro in (128, 32))
    for key, value in weights(whole).items():
        torch.testing.assert_close(value, weights(parts)[key], atol=2e-4, rtol=1e-3)


def test_numbers_that_are_none_stop_the_run_and_say_where(tmp_path: Path) -> None:
    class Poison(Callback):
        def update(self, run: Trainer, loss: float, lr: float) -> None:
            if run.update == 10:
                with torch.no_grad():
                    run.model.get_parameter("stages.1.downsample.conv.weight").fill_(float("nan"))

    message = r"at update 10 with learning rate .*stages.1.downsample.conv.*--resume"
    with pytest.raises(TrainingError, match=message):
        tiny(tmp_path / "run", callbacks=[Poison()])
    ended = resume(tmp_path / "run", progress=False)
    assert all(value.isfinite().all() for value in weights(ended).values())


def test_a_broken_checkpoint_costs_no_result(tmp_path: Path, whole: RunResult) -> None:
    tiny(tmp_path / "cut", save_updates=2, callbacks=[Interrupt(11)])
    last = tmp_path / "cut" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    assert same_weights(resume(tmp_path / "cut", progress=False), whole)


def test_training_starts_from_weights_with_frozen_layers(tmp_path: Path) -> None:
    first = tiny(tmp_path / "first", changes={"schedule.epochs": 1})
    file = str(tmp_path / "first" / "final.safetensors")
    second = tiny(tmp_path / "second", weights=file, freeze_layers=2, changes={"schedule.epochs": 1})
    frozen = {name for _, names in second.model.layer_order[:2] for name in names}
    for key, value in weights(second).items():
        assert torch.equal(value, weights(first)[key]) == (key in frozen) or value.numel() < 20, key


def test_evaluation_and_prediction_use_the_file_alone(tmp_path: Path) -> None:
    result = tiny(tmp_path / "run", changes={"schedule.epochs": 4, "optimizer.lr": 1e-2})
    file = tmp_path / "run" / "final.safetensors"
    found = mixlab.evaluate(file, "digits", split="test", workers=0)
    assert result.test is not None
    assert found["top1"] == pytest.approx(result.test["top1"])
    searched = mixlab.evaluate(file, "digits", split="test", search_crop=True, workers=0)
    assert searched["top1"] >= found["top1"]
    assert searched["crop_searched"] == 1
    image = tmp_path / "grey.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (57, 33), dtype=np.uint8)).save(image)
    (one,) = mixlab.predict(file, [image], top=3)
    assert len(one.classes) == 3
    assert sum(mixlab.predict(file, [image], top=10)[0].probabilities) == pytest.approx(1)


@pytest.mark.parametrize("name", [name for name in list_recipes() if load_recipe(name).task == "classification"])
def test_every_recipe_trains(name: str, tmp_path: Path) -> None:
    family = next((f for f in ("sequencer", "vision_lstm", "hyenapixel", "coat") if name.startswith(f)), "metaformer")
    models = {"sequencer": "sequencer2d_pico", "vision_lstm": "vil_pico", "hyenapixel": "hpx_former_pico"}
    model = {**models, "coat": "coat_lite_pico"}.get(family, "caformer_pico")
    data = dark_and_bright(tmp_path / "data")
    changes: dict[str, Any] = {"schedule.updates": 3, "batch_size": 4, "image_size": 32, "eval_image_size": 32}
    recipe = load_recipe(name, model=model)
    changes |= {"schedule.warmup_updates": 1} if recipe.schedule.warmup_epochs or recipe.schedule.warmup_updates else {}
    changes |= {"schedule.cooldown_epochs": 0, "precision": "float32"}
    depth = {"depths": [2]} if model == "vil_pico" else {}
    settings: dict[str, Any] = {"workers": 0, "tensorboard": False, "progress": False, "options": depth}
    result = train(model, data, out=tmp_path / "run", recipe=name, changes=changes, **settings)
    assert result.history[-1]["train_loss"] > 0


# -- bad input -----------------------------------------------------------------------------------


def bad(tmp_path: Path, message: str, error: type[MixlabError], **changed: Any) -> None:
    row: dict[str, Any] = {
        "model": "caformer_pico",
        "data": "digits",
        "recipe": "digits",
        "changes": CHANGES,
        **changed,
    }
    model, data = row.pop("model"), row.pop("data")
    with pytest.raises(error, match=message):
        train(model, data, out=tmp_path / "out", progress=False, workers=0, **row)
    assert not (tmp_path / "out" / "last.ckpt").exists()


def test_bad_requests_stop_before_training(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    bad(tmp_path, "does not exist", DataError, data=tmp_path / "nowhere")
    bad(tmp_path, "empty", DataError, data=tmp_path / "empty")
    bad(tmp_path, "Unknown model 'caformer_picco'.*caformer_pico", ConfigError, model="caformer_picco")
    bad(tmp_path, "Unknown recipe 'digit'.*digits", ConfigError, recipe="digit")
    bad(tmp_path, "Unknown key 'optimizer.learning_rate'", ConfigError, changes={"optimizer.learning_rate": 1})
    bad(tmp_path, "batch_size is 5000", DataError, changes={"batch_size": 5000})
    bad(tmp_path, "32 px or more", ConfigError, changes={"image_size": 16})
    bad(tmp_path, "no CUDA device", TrainingError, device="cuda")
    other = mixlab.create_model("convformer_pico")
    mixlab.save_weights(other, tmp_path / "other.safetensors")
    bad(tmp_path, "does not fit 'caformer_pico'", MixlabError, weights=str(tmp_path / "other.safetensors"))
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "mine.txt").write_text("keep")
    bad(tmp_path, "exists and is not empty", TrainingError)
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"
    with pytest.raises(TrainingError, match="is not a run folder"):
        resume(tmp_path / "empty")


def test_one_class_or_different_classes_are_errors(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 40))
    for place in ("one/train/a", "one/val/a", "two/train/a", "two/train/b", "two/val/a", "two/val/c"):
        (tmp_path / place).mkdir(parents=True)
        for index in range(4):
            image.save(tmp_path / place / f"{index}.png")
    bad(tmp_path, "class", DataError, data=tmp_path / "one", changes={"batch_size": 2})
    bad(tmp_path, "class", DataError, data=tmp_path / "two", changes={"batch_size": 2})


def test_options_of_the_run_are_checked(tmp_path: Path) -> None:
    bad(tmp_path, "Unknown option 'sed'", ConfigError, sed=3)
    bad(tmp_path, "does not divide", ConfigError, micro=48, options=OPTIONS)


SKIPS = {"schedule.epochs": 3, "evaluate_every": 2}


@pytest.fixture(scope="module")
def whole_with_skips(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return tiny(tmp_path_factory.mktemp("runs") / "skips", changes=SKIPS)


@pytest.mark.parametrize("update", [3, 8, 12])  # inside, at the end of and after an epoch that is not evaluated
def test_a_run_that_skips_evaluations_resumes_as_if_nothing_had_happened(
    update: int, tmp_path: Path, whole_with_skips: RunResult
) -> None:
    assert [row["epoch"] for row in whole_with_skips.history] == [2, 3]
    assert tiny(tmp_path / "parts", changes=SKIPS, callbacks=[Interrupt(update)]).stopped
    parts = resume(tmp_path / "parts", progress=False)
    assert same_weights(whole_with_skips, parts)
    for ours, theirs in zip(parts.history, whole_with_skips.history, strict=True):
        assert ours["train_loss"] == theirs["train_loss"]


def test_a_finished_run_is_read_and_not_run_again(whole: RunResult) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in whole.folder.iterdir()}
    again = resume(whole.folder, progress=False)
    assert again.test == whole.test
    assert list(again.history) == list(whole.history)
    assert same_weights(again, whole)
    assert before == {path.name: path.stat().st_mtime_ns for path in whole.folder.iterdir()}


def test_a_folder_with_another_run_is_not_gone_on_with(whole: RunResult) -> None:
    config = read_config(whole.folder)
    require_same_run(config, whole.folder)
    with pytest.raises(TrainingError, match="another seed"):
        require_same_run(replace(config, seed=5), whole.folder)
