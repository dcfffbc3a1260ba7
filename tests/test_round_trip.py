"""One model all the way round: trained, pushed, loaded, exported, served, asked. One answer everywhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor

import mixlab
import mixlab.hub.timm
from mixlab.cli import main
from mixlab.data import ImageData, open_data
from mixlab.data.images import decode
from mixlab.deploy.export import export, open_export
from mixlab.deploy.serve import serving
from mixlab.evals.subjects import open_subject

DIGITS = range(12)  # of the test split
TOLERANCE = 1e-4  # of a probability


def unseen() -> ImageData:
    data = open_data("digits", "test")
    assert isinstance(data, ImageData)
    return data


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights after a short training, which tells digits apart: else every wrong answer could agree."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    changes = {"schedule.epochs": 5, "schedule.warmup_epochs": 1, "evaluate_every": 5}
    settings: dict[str, Any] = {"recipe": "digits", "workers": 0, "tensorboard": False, "progress": False}
    result = mixlab.train("caformer_pico", "digits", out=folder, changes=changes, **settings)
    assert result.test is not None
    assert result.test["top1"] > 60
    return folder / "final.safetensors"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, digits = tmp_path_factory.mktemp("pictures"), unseen()
    paths = [folder / f"{index}.png" for index in DIGITS]
    for index, path in zip(DIGITS, paths, strict=True):
        digits.read(index).save(path)
    return paths


@pytest.fixture(scope="module")
def pushed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "digits"
    mixlab.push_to_hub(mixlab.create_model(weights=trained), folder, data="digits")
    return folder


@pytest.fixture(scope="module")
def expected(trained: Path, pictures: list[Path]) -> Tensor:
    """(images, classes), by `mixlab.predict` from the run's own file."""
    return ordered([dict(zip(one.classes, one.probabilities, strict=True)) for one in predicted(trained, pictures)])


def predicted(weights: Path, pictures: list[Path]) -> Any:
    return mixlab.predict(weights, pictures, top=10)


def ordered(answers: list[dict[str, float]]) -> Tensor:
    """Probabilities in the order of the classes."""
    return torch.tensor([[answer[name] for name in unseen().class_names] for answer in answers])


def batch(weights: Path, pictures: list[Path]) -> Tensor:
    transform = open_subject(str(weights)).transform()
    return torch.stack([transform(decode(path)) for path in pictures])


def test_most_answers_are_right_and_none_is_like_another(expected: Tensor) -> None:
    digits = unseen()
    right = sum(int(expected[row].argmax()) == digits.label(index) for row, index in enumerate(DIGITS))
    assert right > len(DIGITS) / 2
    assert len({int(row.argmax()) for row in expected}) > 3


LOADERS: dict[str, Callable[[Path], torch.nn.Module]] = {
    "mixlab.create_model": lambda folder: mixlab.create_model(weights=folder / "model.safetensors"),
    "mixlab.from_hub": lambda folder: mixlab.from_hub(folder),
    "timm.create_model": lambda folder: timm.create_model(f"local-dir:{folder}", pretrained=True),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_the_pushed_folder_gives_the_same_answer(
    loader: str, pushed: Path, trained: Path, pictures: list[Path], expected: Tensor
) -> None:
    model = LOADERS[loader](pushed).eval()
    with torch.inference_mode():
        torch.testing.assert_close(model(batch(trained, pictures)).softmax(1), expected, rtol=0, atol=TOLERANCE)


def test_timm_prepares_images_well_enough_to_give_the_same_classes(
    pushed: Path, pictures: list[Path], expected: Tensor
) -> None:
    """By its own transform, from the config.json that was pushed."""
    model = timm.create_model(f"local-dir:{pushed}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    images = torch.stack([transform(Image.open(path).convert("RGB")) for path in pictures])
    with torch.inference_mode():
        assert model(images).argmax(1).tolist() == expected.argmax(1).tolist()


def test_the_exported_file_gives_the_same_answer(
    pushed: Path, trained: Path, pictures: list[Path], expected: Tensor, tmp_path: Path
) -> None:
    export(pushed / "model.safetensors", tmp_path / "digits.onnx")
    scores = open_export(tmp_path / "digits.onnx").run(batch(trained, pictures))
    torch.testing.assert_close(scores.softmax(1), expected, rtol=0, atol=TOLERANCE)


def test_the_server_gives_the_same_answer(pushed: Path, pictures: list[Path], expected: Tensor) -> None:
    answers = []
    with serving(pushed / "model.safetensors") as address:
        for path in pictures:
            request = Request(f"{address}/predict?top=10", path.read_bytes(), {"Content-Type": "image/png"})
            (result,) = json.load(urlopen(request))["results"]
            answers.append({one["name"]: one["score"] for one in result["classes"]})
    torch.testing.assert_close(ordered(answers), expected, rtol=0, atol=TOLERANCE)


def test_the_command_gives_the_same_answer(
    pushed: Path, pictures: list[Path], expected: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = str(pushed / "model.safetensors")
    assert main(["predict", weights, *map(str, pictures), "--top", "10", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    answers = [dict(zip(one["classes"], one["probabilities"], strict=True)) for one in told]
    torch.testing.assert_close(ordered(answers), expected, rtol=0, atol=TOLERANCE)
