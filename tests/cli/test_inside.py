import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images  # type: ignore[import-untyped]

import mixlab
from mixlab.cli import inside
from mixlab.core.errors import ConfigError, DataError
from mixlab.findings.findings import read_finding


def run(verb: str, *arguments: object) -> None:
    parser = getattr(inside, f"{verb}_parser")()
    getattr(inside, verb)(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "flower.png"
    Image.fromarray(load_sample_images().images[1]).resize((160, 107)).save(path)
    return path


def test_kernels_prints_a_row_per_block_and_writes_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("kernels", "hb_former_pico", "--image-size", "48x32", "--out", tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["stages.0.blocks.0", "hyena_bidirectional", "24x16", "767"]
    assert {"kernels.json", "kernels.csv", "kernels.png", "kernels.svg", "coverage.png"} <= set_of(tmp_path)


def test_kernels_of_several_models_share_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("kernels", "hpx_former_pico", "hb_former_pico", "--image-size", "48", "--out", tmp_path)
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert {"hpx_former_pico", "hb_former_pico"} <= set(names)
    assert {"kernels.json", "coverage.svg", "kernels-0.png", "kernels-1.png"} <= set_of(tmp_path)
    with pytest.raises(ConfigError, match="one model for --block; got 2"):
        run("kernels", "hpx_former_pico", "hb_former_pico", "--block", "stages.0.blocks.0")
    with pytest.raises(ConfigError, match="Did you mean 'hb_former_pico'"):
        run("kernels", "hpx_former_pico", "hb_former_pic")


def test_truncate_gives_json_for_programs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    weights = tmp_path / "w.safetensors"
    mixlab.save_weights(mixlab.create_model("hpx_former_pico", num_classes=10), weights)
    run("truncate", weights, "digits", "--shares", 0, 1, "--stages", 1, "--images", 20, "--workers", 0, "--json")
    found = json.loads(capsys.readouterr().out)
    assert [row[:2] for row in found["table"]] == [["stage 1", 0.0], ["stage 1", 1.0]]
    assert found["table"][1][4] == found["settings"]["top1"]


@pytest.mark.parametrize(
    ("model", "what", "pictures"),
    [
        ("caformer_pico", (), {"saliency", "attention-0"}),
        ("vil_pico", (), {"saliency", "gates-0"}),
        ("sequencer2d_pico", (), {"saliency"}),
        ("coat_lite_pico", ("--what", "features", "attention", "gradients", "--steps", "2"),
         {"saliency", "features-0", "attention-0"}),
        ("vil_pico", ("--block", "stages.0.blocks.1"), {"gates-0"}),
        ("convformer_pico", ("--block", "stages.1.blocks.0"), {"features-0"}),
        ("timm:resnet10t", ("--what", "features", "gradcam"), {"saliency", "features-0"}),
    ],
)  # fmt: skip
def test_look_draws_what_is_asked_for(
    model: str, what: tuple[str, ...], pictures: set[str], photo: Path, tmp_path: Path
) -> None:
    run("look", model, photo, "--image-size", "32x48", "--out", tmp_path, *what)
    found = read_finding(tmp_path / "look.json")
    assert {picture.name for picture in found.pictures} == pictures
    assert {f"{name}.{kind}" for name in pictures for kind in ("svg", "png")} <= set_of(tmp_path)
    assert found.table[0][0] == str(photo)


def test_look_tells_how_well_the_gradients_add_up(photo: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    run("look", "deit_tiny", photo, "--image-size", "32", "--what", "gradients", "--target", 7, "--out", tmp_path)
    row = read_finding(tmp_path / "look.json").table[0]
    assert row[3] == "7"
    assert abs(float(row[4] or 0)) < 0.01


def test_a_member_of_an_ensemble_can_be_asked(photo: Path, tmp_path: Path) -> None:
    ensemble = mixlab.models.ensemble.Ensemble(
        [mixlab.create_model(name) for name in ("convformer_pico", "caformer_pico")]
    )
    mixlab.save_weights(ensemble, tmp_path / "e.safetensors")
    with pytest.raises(ConfigError, match=r"is an ensemble.*--member 0"):
        run("look", tmp_path / "e.safetensors", photo, "--out", tmp_path)
    with pytest.raises(ConfigError, match=r"is an ensemble.*--member 0"):
        run("kernels", tmp_path / "e.safetensors")
    run("look", tmp_path / "e.safetensors", photo, "--member", 1, "--out", tmp_path)
    assert "attention-0.png" in set_of(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["caformer_pico", "PHOTO"], "Missing: --out"),
        (["timm:resnet10t", "PHOTO", "--out", "OUT", "--what", "attention"], "only Mixlab's own models"),
        (["caformer_pico", "PHOTO", "--out", "OUT", "--what", "gradcan"], "Did you mean 'gradcam'"),
        (["caformer_pico", "PHOTO", "--out", "OUT", "--what"], "one or more of gradcam"),
        (["caformer_pico", "PHOTO", "--out", "OUT", "--target", "cat"], "no class 'cat'"),
        (["caformer_pico", "PHOTO", "--out", "OUT", "--target", "1000"], "a class from 0 to 999"),
        (["caformer_pico", "PHOTO", "--out", "OUT", "--query", "here"], "DOWN,RIGHT"),
        (["caformer_pico", "PHOTO", "--out", "OUT", "--member", "0"], "single model"),
        (["caformer_pico", "PHOTO", "--out", "OUT", "--what", "gradcam", "--block", "stages.1"], "the model's own"),
        (["caformer_pico", "PHOTO", "--out", "PHOTO"], "is a file"),
        (["caformer_pico", "nowhere.png", "--out", "OUT"], "does not exist"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str, photo: Path, tmp_path: Path) -> None:
    given = [{"PHOTO": str(photo), "OUT": str(tmp_path)}.get(argument, argument) for argument in arguments]
    with pytest.raises((ConfigError, DataError), match=message):
        run("look", *given)


def set_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
