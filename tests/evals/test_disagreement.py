from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import mixlab
from mixlab.errors import ConfigError, DataError
from mixlab.evals.accuracy import evaluate
from mixlab.evals.disagreement import Answers, disagreement, errors_apart, same_wrong_class, together
from mixlab.report.findings import write_finding

TRUTH = torch.tensor([0, 0, 0, 0, 0])


def certain(*predicted: int) -> Answers:
    """A model of three classes that gives its choice 0.8 and the others 0.1."""
    chances = torch.full((len(predicted), 3), 0.1)
    chances[torch.arange(len(predicted)), torch.tensor(predicted)] = 0.8
    return Answers.of(chances, TRUTH[: len(predicted)])


def right(text: str) -> Tensor:
    return torch.tensor([letter == "r" for letter in text])


def test_the_share_of_errors_that_only_one_model_makes() -> None:
    assert errors_apart(right("rrwww"), right("rwwrw")) == pytest.approx(2 / 4)
    assert errors_apart(right("wwrr"), right("rrww")) == 1
    assert errors_apart(right("rwrw"), right("rwrw")) == 0
    assert errors_apart(right("rrrr"), right("rrrr")) is None


def test_common_errors_with_the_same_class() -> None:
    assert same_wrong_class(certain(0, 1, 1, 2, 2), certain(1, 1, 2, 2, 0)) == pytest.approx(2 / 3)
    assert same_wrong_class(certain(0, 1), certain(1, 0)) is None


def test_the_ensemble_is_the_mean_of_probabilities_and_the_oracle_one_right_model() -> None:
    sure = Answers.of(torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.45, 0.55]]), torch.tensor([0, 0, 0]))
    unsure = Answers.of(torch.tensor([[0.4, 0.6], [0.6, 0.4], [0.48, 0.52]]), torch.tensor([0, 0, 0]))
    mean, oracle = together([sure, unsure], torch.tensor([0, 0, 0]))
    assert mean == pytest.approx(1 / 3)  # 0.65, 0.35, 0.465
    assert oracle == pytest.approx(2 / 3)


def test_a_tie_and_what_is_no_number_count_as_errors() -> None:
    chances = torch.tensor([[0.5, 0.5], [float("nan"), float("nan")], [0.6, 0.4]])
    assert Answers.of(chances, torch.tensor([0, 0, 0])).right.tolist() == [False, False, True]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models that were not trained, but have files that say what their classes are."""
    paths = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = mixlab.create_model("convformer_pico", num_classes=10)
        torch.nn.init.normal_(cast(nn.Linear, model.head.classifier).weight)
        model.class_names = tuple(str(digit) for digit in range(10))
        paths.append(str(tmp_path_factory.mktemp("weights") / f"{seed}.safetensors"))
        mixlab.save_weights(model, paths[-1])
    return paths


def test_a_model_with_itself_has_all_errors_in_common(weights: list[str]) -> None:
    told, _ = disagreement([weights[0], weights[0]], "digits", split="test", workers=0, device="cpu")
    alone, _, both = told.table
    assert both[3] == 0
    assert both[4] == 100
    assert both[1:3] == alone[1:3]
    assert alone[1] == pytest.approx(evaluate(weights[0], "digits", split="test", workers=0)["top1"])


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images for each of ten digits that show nothing."""
    root = tmp_path_factory.mktemp("noise")
    random = np.random.default_rng(0)
    for digit in range(10):
        (root / "test" / str(digit)).mkdir(parents=True)
        for index in range(3):
            pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "test" / str(digit) / f"{index}.png")
    return root


def test_every_pair_and_all_together(weights: list[str], noise: Path, tmp_path: Path) -> None:
    models = [*weights, "timm:test_resnet"]
    told, figures = disagreement(models, noise, split="test", workers=0, device="cpu")
    assert len(told.table) == 3 + 3 + 1
    assert told.table[-1][0] == "all 3"
    for pair in told.data["pairs"]:
        apart = pair["only_first_right"] + pair["only_second_right"]
        assert apart + pair["both_right"] + pair["both_wrong"] == told.settings["images"]
        assert pair["errors_not_in_common"] == pytest.approx(apart / (apart + pair["both_wrong"]))
    one_right: list[Any] = [row[2] for row in told.table]
    assert one_right[-1] == max(one_right)  # more models, more chances
    write_finding(told, tmp_path, figures)
    assert (tmp_path / "disagree.png").is_file()


def test_one_model_is_too_few_and_other_classes_are_refused(weights: list[str]) -> None:
    with pytest.raises(ConfigError, match="two models"):
        disagreement(weights[:1], "digits")
    model = mixlab.create_model("convformer_pico", num_classes=7)
    with pytest.raises(DataError, match="7 classes apart"):
        disagreement([model, model], "digits")
