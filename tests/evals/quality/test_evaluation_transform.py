"""One transform from an image to a tensor, wherever a model is evaluated: training, files and every consumer."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import mixlab
from mixlab.core.errors import ConfigError
from mixlab.data.transforms import Resize, ToTensor, eval_transform
from mixlab.deploy.serving.answers import AskedClasses
from mixlab.deploy.serving.predictors import ClassPredictor
from mixlab.deploy.specimen import open_specimen
from mixlab.evals.quality.accuracy import evaluate, predict
from mixlab.evals.quality.examine import Feeding, Look, Pixels
from mixlab.evals.quality.resized import resized
from mixlab.evals.subjects import open_subject
from mixlab.hub.timm import default_cfg
from mixlab.models.backbone import Backbone
from mixlab.models.config import Preprocessing
from mixlab.models.weights import save_weights
from mixlab.models.zoo import configure, model_config
from mixlab.training.recipe import load_recipe
from mixlab.training.run import RunResult, train
from tests.training.tiny import OPTIONS, tiny

SQUASH = {"crop": 1.0, "crop_mode": "squash"}


def wide(label: int, seed: int) -> Image.Image:
    """Seven times as wide as high, noise but for its ends: the left one bright or the right one."""
    pixels = np.random.default_rng(seed).integers(96, 160, (32, 224, 3), dtype=np.uint8)
    pixels[:, :56], pixels[:, -56:] = (255, 0) if label else (0, 255)
    return Image.fromarray(pixels)


def edges(folder: Path, each: int = 16) -> Path:
    """A dataset of wide images, of which a center crop shows noise alone."""
    for place, split in enumerate(("train", "val", "test")):
        for label in (0, 1):
            (folder / split / "ab"[label]).mkdir(parents=True)
            for index in range(each):
                image = wide(label, seed=1000 * place + 100 * label + index)
                image.save(folder / split / "ab"[label] / f"{index}.png")
    return folder


def squashed_tensor(model: Backbone, image: Image.Image) -> Tensor:
    settings, size = model.config.preprocessing, model.config.evaluation_size
    return ToTensor(settings.mean, settings.std)(Resize(size, settings.interpolation)(image))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edges(tmp_path_factory.mktemp("edges"))


@pytest.fixture(scope="module")
def squashing(tmp_path_factory: pytest.TempPathFactory, data: Path) -> RunResult:
    """A run whose recipe squeezes wide images into squares, in training and in evaluation."""
    changes: dict[str, Any] = {
        **{"augmentation.crop": "squash", "augmentation.flip": 0, "eval_crop_mode": "squash", "eval_crop": 1.0},
        **{"batch_size": 16, "schedule.epochs": 8, "schedule.warmup_epochs": 0, "optimizer.lr": 1e-2},
        **{"image_size": 32, "evaluate_every": 8, "augmentation.mixup": 0.0, "augmentation.cutmix": 0.0},
    }
    return train(
        *("caformer_pico", data),
        out=tmp_path_factory.mktemp("runs") / "squash",
        recipe="from_scratch_small",
        changes=changes,
        options=OPTIONS,
        workers=0,
        tensorboard=False,
        progress=False,
        device="cpu",
    )


def test_what_the_edges_of_a_wide_image_show_decides_its_class(squashing: RunResult, data: Path) -> None:
    file = squashing.folder / "final.safetensors"
    assert squashing.test is not None
    assert squashing.test["top1"] > 90
    image = data / "test" / "b" / "0.png"
    assert predict(file, [image])[0].classes[0] == "b"
    cropped = mixlab.create_model(weights=file, preprocessing={"crop_mode": "center"})
    assert evaluate(cropped, data, split="test", workers=0, device="cpu")["top1"] < 80


def test_the_recipe_of_vtab_squeezes_whole_images_and_drops_no_block() -> None:
    recipe = load_recipe("vision_lstm_vtab", model="vil_small")
    assert (recipe.augmentation.crop, recipe.eval_crop_mode, recipe.eval_crop) == ("squash", "squash", 1.0)
    assert recipe.drop_path == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"eval_crop": 0.5},
        {"eval_image_size": 48, "eval_crop": 0.75},
        {"eval_crop_mode": "squash"},
        {"image_size": 40},
    ],
    ids=str,
)
def test_a_file_is_evaluated_as_its_run_evaluated_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = tiny(tmp_path / "run", changes=changes)
    told = json.loads((run.folder / "result.json").read_text())["test"]
    found = evaluate(run.folder / "final.safetensors", "digits", split="test", workers=0, device="cpu")
    assert {name: found[name] for name in ("top1", "top5", "val_loss")} == pytest.approx(
        {name: told[name] for name in ("top1", "top5", "val_loss")}, rel=1e-5
    )


def test_a_command_line_model_size_does_not_change_where_a_run_evaluates(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", changes={"image_size": 32}, options={**OPTIONS, "image_size": 64})
    assert run.model.config.image_size == (64, 64)
    assert run.model.config.evaluation_size == (32, 32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    """Built for one size, evaluated at another one of wide images that are squeezed."""
    torch.manual_seed(0)
    preprocessing = {**SQUASH, "image_size": [48, 64]}
    built = mixlab.create_model("caformer_pico", num_classes=3, image_size=32, preprocessing=preprocessing).eval()
    file = tmp_path_factory.mktemp("file") / "model.safetensors"
    save_weights(built, file)
    return mixlab.create_model(weights=file).eval()


def test_every_consumer_makes_the_same_tensor(model: Backbone, tmp_path: Path) -> None:
    image = wide(1, seed=0)
    expected = squashed_tensor(model, image)
    assert expected.shape == (3, 48, 64)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    image.save(tmp_path / "wide.png")
    served = ClassPredictor(model).prepare(buffer.getvalue(), AskedClasses())
    subject = open_subject(model)
    assert torch.equal(subject.transform()(image), expected)
    assert torch.equal(open_specimen(model, None).transform()(image), expected)
    assert torch.equal(served.tensor, expected)
    assert served.box == [0, 0, 224, 32]
    pixels = Pixels(Look.of(subject, Feeding()))(image)
    settings = model.config.preprocessing
    normal = (pixels - torch.tensor(settings.mean)[:, None, None]) / torch.tensor(settings.std)[:, None, None]
    torch.testing.assert_close(normal, expected)
    with torch.inference_mode():
        chance = model(expected[None]).softmax(-1).max()
    assert predict(model, [tmp_path / "wide.png"])[0].probabilities[0] == pytest.approx(float(chance), rel=1e-4)
    at_another, _ = resized(subject, (64, 64))
    assert torch.equal(at_another.transform()(image), eval_transform((64, 64), settings, 3)(image))


def test_metadata_tell_how_images_are_prepared(model: Backbone) -> None:
    about = open_specimen(model, None).about(1)
    assert (about["crop"], about["crop_mode"], about["image_size"]) == (1.0, "squash", [48, 64])
    told = default_cfg(model.config)
    assert (told["crop_mode"], told["input_size"], told["test_input_size"]) == ("squash", (3, 32, 32), (3, 48, 64))
    assert "test_input_size" not in default_cfg(model_config("caformer_pico"))


def test_timm_prepares_images_as_the_run_did(model: Backbone, tmp_path: Path) -> None:
    import timm

    mixlab.push_to_hub(model, tmp_path / "model")
    there = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True)
    assert there.config.preprocessing == model.config.preprocessing
    settings = timm.data.resolve_model_data_config(there, use_test_size=True)
    assert (list(settings["input_size"]), settings["crop_mode"], settings["crop_pct"]) == ([3, 48, 64], "squash", 1.0)


def test_a_new_size_of_the_model_is_its_size_in_evaluation(model: Backbone) -> None:
    row = model.config.plain()
    assert configure(row, {"image_size": 64}).evaluation_size == (64, 64)
    assert configure(row, {"num_classes": 5}).evaluation_size == (48, 64)
    assert configure(row, {"image_size": 64, "preprocessing": {"image_size": 96}}).evaluation_size == (96, 96)
    assert Preprocessing(image_size=None) == Preprocessing()


@pytest.mark.parametrize("preprocessing", [{"crop_mode": "fold"}, {"image_size": 16}, {"image_size": [64]}])
def test_preprocessing_that_cannot_be_is_an_error(preprocessing: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"crop_mode|32 px|image size"):
        mixlab.create_model("caformer_pico", preprocessing=preprocessing)


@pytest.mark.parametrize("name", ["coat_tiny", "coat_lite_small", "deit_tiny", "deit_base"])
def test_coat_and_deit_are_evaluated_on_224_of_256_pixels(name: str) -> None:
    assert model_config(name).preprocessing.crop == 224 / 256
