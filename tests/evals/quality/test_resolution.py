from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import mixlab
from mixlab.core.errors import ConfigError, ImageError
from mixlab.data.images import decode
from mixlab.evals.quality.resized import resized
from mixlab.evals.quality.resolution import ResolutionRow, resolution, with_relative
from mixlab.evals.subjects import open_subject
from mixlab.findings.findings import write_finding


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve small pictures of two classes, dark and bright."""
    from PIL import Image

    root = tmp_path_factory.mktemp("data")
    for name, base in (("bright", 180), ("dark", 20)):
        (root / "val" / name).mkdir(parents=True)
        for index in range(6):
            Image.new("RGB", (40, 40), (base + index, base, base)).save(root / "val" / name / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def weights(data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose last layer was fitted to tell the two apart at 32 px."""
    torch.manual_seed(0)
    model = mixlab.create_model("convformer_pico", num_classes=2).eval()
    transform = open_subject(model).transform()
    with torch.no_grad():
        bright, dark = (
            model.embed(torch.stack([transform(decode(path)) for path in (data / "val" / name).iterdir()])).mean(0)
            for name in ("bright", "dark")
        )
        classifier = cast(nn.Linear, model.head.classifier)
        classifier.weight.copy_(torch.stack([bright - dark, dark - bright]))
        middle = (bright - dark) @ (bright + dark) / 2
        classifier.bias.copy_(torch.stack([-middle, middle]))
    model.class_names = ("bright", "dark")
    path = tmp_path_factory.mktemp("weights") / "fitted.safetensors"
    mixlab.save_weights(model, path)
    return str(path)


def test_the_row_of_the_training_size_is_always_there_and_has_relative_accuracy_1(
    data: Path, weights: str, tmp_path: Path
) -> None:
    options = {"seconds": 0.05, "workers": 0, "device": "cpu", "batch": 4}
    told, figures = resolution([weights, "vil_pico"], data, sizes=[48, (32, 64)], memory=False, **options)  # type: ignore[arg-type]
    rows: list[Any] = list(told.table[:3])
    assert [(row[1], row[2]) for row in rows] == [("32", True), ("32x64", False), ("48", False)]
    assert rows[0][4:6] == (100, 1)
    for row in rows:
        assert row[5] == pytest.approx(row[4] / 100)
        assert row[6] > 0
        assert row[7] is None
    write_finding(told, tmp_path, figures)
    assert (tmp_path / "resolution.svg").is_file()


def test_relative_accuracy_needs_some_accuracy_at_the_own_size() -> None:
    row = ResolutionRow(size=(48, 48), own_size=False, top1=40.0)
    assert with_relative(row, 80.0).relative == 0.5
    assert with_relative(row, 0.0).relative is None
    assert with_relative(ResolutionRow(size=(48, 48), own_size=False), 80.0).relative is None


def test_a_size_that_a_model_cannot_take_has_a_row_with_the_reason(data: Path) -> None:
    told, _ = resolution(["timm:mixer_s32_224"], data, sizes=[64], seconds=0, memory=False, workers=0, device="cpu")
    rows: list[Any] = list(told.table)
    refused, at_home = rows
    assert refused[1] == "64"
    assert refused[4] is None
    assert "cannot take 64 x 64 px: Input height (64) doesn't match model (224)" in refused[8]
    assert at_home[1:3] == ("224", True)
    assert at_home[4] is not None


def test_every_model_has_sizes_on_its_own_grid_and_padded_ones_are_marked(data: Path) -> None:
    options: dict[str, Any] = {"sizes": [50], "seconds": 0, "memory": False, "workers": 0, "device": "cpu"}
    models = ["sequencer2d_pico", "vil_pico"]
    told, figures = resolution(models, data, step="own", **options)
    assert [(row[0], row[1], row[8]) for row in told.table] == [
        ("sequencer2d_pico", "32", ""),
        ("sequencer2d_pico", "48", ""),
        ("vil_pico", "32", ""),
        ("vil_pico", "52", ""),
    ]
    assert told.settings["steps"] == [8, 4]
    assert legend_of(figures) == models
    told, figures = resolution(models, data, **options)
    assert [row[8] for row in told.table] == ["", "padded", "", "padded"]
    assert [row["padded"] for rows in told.data["rows"] for row in rows] == [False, True, False, True]
    assert legend_of(figures) == [*models, "padded"]
    with pytest.raises(ConfigError, match="pixels such as 32 for all models; got 'all'"):
        resolution(models, data, step="all", **options)  # type: ignore[arg-type]


def legend_of(figures: dict[str, Any]) -> list[str]:
    return [text.get_text() for text in figures["resolution"].legends[0].get_texts()]


def test_memory_grows_with_the_size(data: Path) -> None:
    options = {"sizes": [256], "seconds": 0, "workers": 0, "device": "cpu"}
    told, _ = resolution(["convformer_pico"], data, **options)  # type: ignore[arg-type]
    rows: list[Any] = list(told.table)
    small, large = (row[7] for row in rows)
    assert 0 < small < large


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_a_model_for_one_size_is_fitted_to_another_with_its_weights(name: str) -> None:
    subject = open_subject(f"timm:{name}", num_classes=3)
    before = {key: value.clone() for key, value in subject.model.state_dict().items()}
    fitted, how = resized(subject, (96, 96))
    assert how == "resampled"
    assert fitted.model(torch.zeros(1, 3, 96, 96)).shape == (1, 3)
    after = fitted.model.state_dict()
    same = [key for key in before if before[key].shape == after[key].shape and torch.equal(before[key], after[key])]
    assert len(same) > 0.8 * len(before)
    assert all(torch.equal(value, before[key]) for key, value in subject.model.state_dict().items())


def test_a_model_without_a_way_to_change_its_size_is_built_anew() -> None:
    subject = open_subject("timm:coat_tiny", num_classes=3)
    fitted, how = resized(subject, (64, 64))
    assert how == "resampled"
    torch.testing.assert_close(fitted.model.head.weight, subject.model.head.weight)  # type: ignore[union-attr]


def test_what_takes_any_size_is_left_as_it_is() -> None:
    for name in ("timm:resnet18", "caformer_pico"):
        subject = open_subject(name, num_classes=3)
        fitted, how = resized(subject, (96, 64))
        assert how == "as it is"
        assert fitted.model is subject.model
        assert fitted.image_size == (96, 64)


def test_the_error_says_why() -> None:
    subject = open_subject("timm:mixer_s32_224", num_classes=3)
    with pytest.raises(ImageError, match="size mismatch"):
        resized(subject, (64, 64))
