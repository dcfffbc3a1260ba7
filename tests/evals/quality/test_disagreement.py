from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import mixlab
from mixlab.core.errors import ConfigError, DataError
from mixlab.evals.quality.accuracy import evaluate
from mixlab.evals.quality.disagreement import ModelAnswers, disagreement, errors_apart, same_wrong_class, together
from mixlab.findings.findings import write_finding
from mixlab.models.ensemble import Average

TRUTH = torch.tensor([0, 0, 0, 0, 0])


def certain(*predicted: int) -> ModelAnswers:
    """A model of three classes that gives its choice 0.8 and the others 0.1."""
    chances = torch.full((len(predicted), 3), 0.1)
    chances[torch.arange(len(predicted)), torch.tensor(predicted)] = 0.8
    return ModelAnswers.of(chances, TRUTH[: len(predicted)])


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


def test_an_ensemble_averages_logits_unless_told_to_average_probabilities() -> None:
    truth = torch.tensor([0])
    scores = ([[5.0, 0.0]], [[0.0, 1.5]], [[0.0, 1.5]])  # the probabilities of class 0 are 0.99, 0.18 and 0.18
    group = [ModelAnswers.of(torch.tensor(one), truth) for one in scores]
    assert together(group, truth)[0] == 1
    assert together(group, truth, "probabilities")[0] == 0


def test_the_oracle_needs_one_model_that_is_right() -> None:
    truth = torch.tensor([0, 0, 0])
    first = ModelAnswers.of(torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.45, 0.55]]), truth)
    second = ModelAnswers.of(torch.tensor([[0.4, 0.6], [0.6, 0.4], [0.48, 0.52]]), truth)
    assert together([first, second], truth)[1] == pytest.approx(2 / 3)


def test_a_tie_and_what_is_no_number_count_as_errors() -> None:
    chances = torch.tensor([[0.5, 0.5], [float("nan"), float("nan")], [0.6, 0.4]])
    assert ModelAnswers.of(chances, torch.tensor([0, 0, 0])).right.tolist() == [False, False, True]


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


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_a_pair_is_as_good_as_the_ensemble_of_its_models(weights: list[str], average: Average, tmp_path: Path) -> None:
    members = [mixlab.create_model(weights=path) for path in weights]
    with torch.no_grad():  # the first model is never sure of anything, and loses wherever logits are averaged
        cast(nn.Linear, members[0].head.classifier).weight.mul_(0.1)
    files = [str(tmp_path / f"{index}.safetensors") for index in range(2)]
    for member, path in zip(members, files, strict=True):
        mixlab.save_weights(member, path)
    mixlab.save_weights(mixlab.Ensemble(members, average=average), tmp_path / "both.safetensors")
    told, _ = disagreement(files, "digits", split="test", average=average, workers=0, device="cpu")
    both = evaluate(str(tmp_path / "both.safetensors"), "digits", split="test", workers=0)
    assert told.settings["average"] == average
    assert told.table[-1][1] == pytest.approx(both["top1"])


def test_another_average_is_refused_before_the_work(weights: list[str]) -> None:
    with pytest.raises(ConfigError, match="averages 'logits' or 'probabilities'; got 'votes'"):
        disagreement(weights, "digits", average=cast(Average, "votes"))


def test_one_model_is_too_few_and_other_classes_are_refused(weights: list[str]) -> None:
    with pytest.raises(ConfigError, match="two models"):
        disagreement(weights[:1], "digits")
    model = mixlab.create_model("convformer_pico", num_classes=7)
    with pytest.raises(DataError, match="7 classes apart"):
        disagreement([model, model], "digits")
