"""Segmenters and detectors through the same loop, resume, evaluation and prediction as classifiers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mixlab
from mixlab.cli import main
from mixlab.data.open_dense import open_dense
from mixlab.evals.quality.dense import evaluate_dense, predict_dense
from mixlab.training.recipe import list_recipes, load_recipe
from mixlab.training.run import resume, train
from tests.training.tiny import Interrupt

QUICK: dict[str, Any] = {"progress": False, "workers": 0, "tensorboard": False, "device": "cpu"}
SHORT = {"schedule.updates": 3, "schedule.warmup_updates": 1, "batch_size": 2}
RECIPES = {"segmentation": "segmentation_small", "detection": "detection_small"}
METRIC = {"segmentation": "mIoU", "detection": "box_AP"}


@pytest.fixture(autouse=True)
def few_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mixlab.data.scenes.SCENES", {"train": 8, "val": 3, "test": 3})


@pytest.mark.parametrize("task", RECIPES)
def test_a_run_can_be_stopped_resumed_evaluated_and_shown(task: str, tmp_path: Path) -> None:
    common = {"recipe": RECIPES[task], "changes": SHORT, **QUICK}
    whole = train("convformer_pico", "digit-scenes", out=tmp_path / "whole", **common)
    assert METRIC[task] in whole.history[-1]
    assert whole.test is not None

    stopped = train("convformer_pico", "digit-scenes", out=tmp_path / "parts", callbacks=[Interrupt(2)], **common)
    assert stopped.stopped
    again = resume(tmp_path / "parts", progress=False)
    ours, expected = again.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[key], expected[key]) for key in expected)

    weights = tmp_path / "whole" / "final.safetensors"
    loaded = mixlab.load_dense(weights)
    assert loaded.class_names == open_dense("digit-scenes", "val", task).class_names
    found = evaluate_dense(weights, "digit-scenes", split="test", workers=0, device="cpu")
    assert found[METRIC[task]] == pytest.approx(whole.test[METRIC[task]])

    picture = tmp_path / "grey.png"
    Image.new("L", (57, 33), 99).save(picture)
    (told,) = predict_dense(weights, [picture], out=tmp_path / "drawn", threshold=0.0)
    assert Image.open(told["picture"]).size[0] >= 57


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("segmentation", {"segmentation.decoder": "linear", "segmentation.auxiliary_map": 0}),
        ("detection", {"detector.kind": "cascade_mask_rcnn"}),
        ("detection", {"detector.kind": "deformable_detr", "detector.queries": 10, "detector.score_threshold": 0.0}),
    ],
)
def test_every_decoder_and_detector_trains(task: str, changes: dict[str, Any], tmp_path: Path) -> None:
    words = {"recipe": RECIPES[task], "changes": SHORT | changes, **QUICK}
    result = train("sequencer2d_pico", "digit-scenes", out=tmp_path / "run", **words)
    assert torch.isfinite(torch.tensor(result.history[-1]["train_loss"]))


DENSE = [name for name in list_recipes() if load_recipe(name).task != "classification"]


@pytest.mark.parametrize("name", DENSE)
def test_every_recipe_trains(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    changes: dict[str, Any] = {"schedule.updates": 3, "schedule.warmup_updates": 1, "batch_size": 2}
    changes |= {"precision": "float32", "schedule.milestones": [2]}
    if recipe.task == "segmentation":
        changes |= {"image_size": 64, "segmentation.width": 16, "segmentation.auxiliary_width": 16}
    else:
        changes |= {
            "detection.shorter": [64, 80],
            "detector.shorter": 80,
            "detector.longer": 120,
            "detection.crop": 0.0,
        }
        changes |= {"detector.width": 64, "detector.head_width": 32, "detector.queries": 10, "detector.proposals": 50}
        changes |= {"detector.deformable.encoder_layers": 1, "detector.deformable.decoder_layers": 1}
    model = "vil_pico" if name.startswith("vision") else "coat_lite_pico" if "coat" in name else "hpx_former_pico"
    result = train(model, "digit-scenes", out=tmp_path / "run", recipe=name, changes=changes, **QUICK)
    assert result.history[-1]["train_loss"] > 0


def test_weights_of_a_classifier_start_a_segmenter(tmp_path: Path) -> None:
    classifier = mixlab.create_model("convformer_pico", num_classes=4)
    mixlab.save_weights(classifier, tmp_path / "classifier.safetensors")
    words = {"recipe": "segmentation_small", "changes": SHORT | {"optimizer.lr": 1e-9}, **QUICK}
    words["weights"] = str(tmp_path / "classifier.safetensors")
    result = train("convformer_pico", "digit-scenes", out=tmp_path / "run", **words)
    ours, theirs = (model.get_parameter("stem.conv.weight") for model in (result.model.backbone, classifier))
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(mixlab.MixlabError, match="load_dense"):
        mixlab.create_model(weights=tmp_path / "run" / "final.safetensors")


def test_a_detector_is_trained_with_the_windows_of_its_paper_on_weights_without_them(tmp_path: Path) -> None:
    mixlab.save_weights(mixlab.create_model("caformer_pico", num_classes=4), tmp_path / "classifier.safetensors")
    words = {
        "recipe": "detection_small",
        "changes": SHORT,
        "weights": str(tmp_path / "classifier.safetensors"),
        **QUICK,
    }
    train("caformer_pico", "digit-scenes", out=tmp_path / "run", **words)
    loaded = mixlab.load_dense(tmp_path / "run" / "final.safetensors")
    assert [mixer.name for mixer in loaded.backbone.config.mixers[2:]] == ["window_attention"] * 2


@pytest.mark.parametrize(
    ("recipe", "data", "changes", "message"),
    [
        ("segmentation_small", "nowhere", {}, "digit-scenes"),
        ("detection_small", "digits", {}, "digit-scenes"),
        (
            "segmentation_small",
            "digit-scenes",
            {"augmentation.crop": "squash", "augmentation.scale": [1, 1]},
            "rescaled",
        ),
        ("detection_small", "digit-scenes", {"schedule.name": "step"}, "milestones"),
        ("detection_small", "digit-scenes", {"detector.kind": "yolo"}, "mask_rcnn"),
        ("detection_small", "digit-scenes", {"detector.widht": 3}, "width"),
        ("detection_small", "digit-scenes", {"batch_size": 9}, "only 8"),
    ],
)
def test_what_does_not_fit_is_said_before_training(
    recipe: str, data: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    words = {"recipe": recipe, "changes": SHORT | changes, **QUICK}
    with pytest.raises(mixlab.MixlabError, match=message):
        train("convformer_pico", data, out=tmp_path / "run", **words)
    assert not (tmp_path / "run" / "last.ckpt").exists()


def test_the_command_line_trains_evaluates_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def mixlab_says(*words: str) -> str:
        code, said = main(words), capsys.readouterr()
        assert code == 0, said.err
        return said.out

    settings = ["schedule.updates=2", "schedule.warmup_updates=1", "batch_size=2"]
    settings += ["segmentation.width=16", "segmentation.auxiliary_width=16"]
    common = ["--task", "segmentation", "--workers", "0", "--no-tensorboard", "--set", *settings]
    said = mixlab_says("train", "convformer_pico", "digit-scenes", "--out", str(tmp_path / "run"), *common)
    assert "mIoU" in said
    weights = str(tmp_path / "run" / "final.safetensors")
    assert json.loads(mixlab_says("eval", weights, "digit-scenes", "--json", "--split", "val"))["images"] == 3
    Image.new("RGB", (40, 70), "teal").save(tmp_path / "one.png")
    said = mixlab_says("predict", weights, str(tmp_path / "one.png"), "--out", str(tmp_path / "drawn"))
    assert (tmp_path / "drawn" / "one.png").exists()
    assert "one.png" in said


def test_pictures_never_replace_images_or_each_other(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (40, 40), "teal").save(tmp_path / folder / "x.png")
    segmenter = mixlab.create_segmenter("convformer_pico", num_classes=3, width=16, auxiliary_width=16, image_size=64)
    images = [tmp_path / "a" / "x.png", tmp_path / "b" / "x.png"]
    with pytest.raises(mixlab.MixlabError, match="replace the image"):
        predict_dense(segmenter, images, out=tmp_path / "a")
    told = predict_dense(segmenter, images, out=tmp_path / "drawn")
    assert [Path(one["picture"]).name for one in told] == ["x.png", "x-2.png"]
