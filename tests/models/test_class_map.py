"""A classifier from rows of a larger one."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import mixlab
from mixlab.cli import main
from mixlab.core.errors import ConfigError, MixlabError
from mixlab.models.class_map import read_class_map
from tests.training.tiny import dark_and_bright

LARGE = ("ant", "bright", "cat", "dark", "eel")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = mixlab.create_model("caformer_pico", num_classes=5)
    torch.nn.init.normal_(model.get_parameter("head.classifier.bias"))
    model.class_names = LARGE
    path = tmp_path_factory.mktemp("large") / "large.safetensors"
    mixlab.save_weights(model, path)
    return path


def scores(model: mixlab.Backbone) -> Tensor:
    torch.manual_seed(1)
    with torch.inference_mode():
        return model.eval()(torch.randn(2, 3, 32, 32))


def write(folder: Path, *lines: str) -> str:
    (folder / "map.txt").write_text("\n".join(lines), encoding="utf-8")
    return str(folder / "map.txt")


def test_classes_take_their_rows_and_one_without_a_counterpart_the_mean(large: Path) -> None:
    before = scores(mixlab.create_model(weights=large))
    small = mixlab.create_model("caformer_pico", weights=large, num_classes=3, class_map=(3, -1, 1))
    expected = torch.stack([before[:, 3], before.mean(1), before[:, 1]], 1)
    torch.testing.assert_close(scores(small), expected, rtol=1e-4, atol=1e-5)
    assert small.class_names == ()


@pytest.mark.parametrize(
    ("lines", "rows"),
    [
        (["3", "1"], (3, 1)),
        (["# made by hand", "", "bright", "-"], (1, -1)),
        (["dark\t3", "bright\t-"], (-1, 3)),
        (["dark\tdark", "bright\tbright"], (1, 3)),
    ],
    ids=str,
)
def test_a_file_has_a_row_a_name_or_a_dash_for_each_class(
    large: Path, tmp_path: Path, lines: list[str], rows: tuple[int, ...]
) -> None:
    assert read_class_map(write(tmp_path, *lines), ("bright", "dark"), str(large)) == rows


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["1"], "maps 1 classes; the data has 2"),
        (["1", "drak"], "Did you mean 'dark'|dark"),
        (["dark\t1", "dark\t2"], "twice"),
        (["dark\t1"], "says nothing of 1 classes"),
        (["dark\t1", "fish\t2"], "does not have"),
        (["dark\t1", "2"], "all lines are of one kind"),
    ],
    ids=str,
)
def test_a_file_that_does_not_fit_is_explained(large: Path, tmp_path: Path, lines: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_class_map(write(tmp_path, *lines), ("bright", "dark"), str(large))


def test_imagenet_1k_has_one_class_without_a_row_in_imagenet_21k() -> None:
    from timm.data import ImageNetInfo

    names = ImageNetInfo("imagenet-1k").label_names()
    rows = read_class_map("imagenet21k", names, "")
    assert [name for name, row in zip(names, rows, strict=True) if row == -1] == ["n04399382"]
    assert max(rows) < 21841
    assert len(set(rows)) == 1000
    with pytest.raises(ConfigError, match="WordNet names"):
        read_class_map("imagenet21k", ("ant", "bee"), "")


def test_rows_that_do_not_exist_and_files_that_do_not_are_errors(large: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rows 0 to 4"):
        mixlab.create_model("caformer_pico", weights=large, num_classes=2, class_map=(0, 5))
    with pytest.raises(ConfigError, match="2 are needed; got 3"):
        mixlab.create_model("caformer_pico", weights=large, num_classes=2, class_map=(0, 1, 2))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_class_map(str(tmp_path / "none.txt"), ("a", "b"), str(large))
    state = mixlab.create_model("caformer_pico", num_classes=0).state_dict()
    with pytest.raises(MixlabError, match="no classifier"):
        mixlab.load_weights(mixlab.create_model("caformer_pico", num_classes=2), state, class_map=(0, 1))


def test_fine_tuning_starts_from_the_rows_of_the_map(large: Path, tmp_path: Path) -> None:
    data = dark_and_bright(tmp_path / "data")
    words = ["finetune", "caformer_pico", str(large), str(data), "--out", str(tmp_path / "run"), "--epochs", "1"]
    small = [
        "--set",
        "batch_size=4",
        "optimizer.lr=1e-12",
        "schedule.warmup_epochs=0",
        "--device",
        "cpu",
        "--workers",
        "0",
        "--no-tensorboard",
    ]
    assert main([*words, *small, "--class-map", write(tmp_path, "dark\tdark", "bright\tbright")]) == 0
    tuned = mixlab.create_model(weights=tmp_path / "run" / "final.safetensors")
    before = mixlab.create_model(weights=large)
    assert tuned.class_names == ("bright", "dark")
    ours, theirs = (model.get_parameter("head.classifier.weight") for model in (tuned, before))
    torch.testing.assert_close(ours, theirs[[1, 3]], rtol=1e-3, atol=1e-4)


def test_a_map_without_weights_says_what_it_is_for(tmp_path: Path) -> None:
    from mixlab.training.run import train

    with pytest.raises(ConfigError, match="weights for a class map"):
        train("caformer_pico", "digits", out=tmp_path / "run", recipe="digits", class_map=write(tmp_path, "1"))


def test_a_map_for_a_segmenter_is_refused(large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["finetune", "caformer_pico", str(large), "digit-scenes", "--recipe", "segmentation_small"]
    assert main([*words, "--out", str(tmp_path / "run"), "--class-map", write(tmp_path, "1")]) == 2
    assert "no class map for segmentation" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
