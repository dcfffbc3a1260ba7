import json
from pathlib import Path

import pytest

from mixlab.cli import seeing
from mixlab.core.errors import ConfigError, DataError
from mixlab.findings.findings import read_finding


def run(verb: str, *arguments: str) -> None:
    parser = getattr(seeing, f"{verb}_parser")()
    getattr(seeing, verb)(parser.parse_args([str(one) for one in arguments]))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    from PIL import Image

    for name, gray in (("bright", 200), ("dark", 20)):
        (tmp_path / "data" / "val" / name).mkdir(parents=True)
        Image.new("RGB", (40, 40), (gray,) * 3).save(tmp_path / "data" / "val" / name / "one.png")
    return tmp_path / "data"


def test_erf_prints_a_plain_table_and_writes_the_gallery(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    models = ("sequencer2d_pico", "convformer_pico")
    run("erf", *models, "--data", str(data), "--at", "stages.0", "stem", "--scale", "each", "--out", str(out))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["sequencer2d_pico", "stages.0", "8x8"]
    assert lines[4].endswith("the channels cancel: their sum does not depend on the image")  # a stem with its norm last
    assert {path.name for path in out.iterdir()} == {"erf.json", "erf.csv", "erf.svg", "erf.png"}
    assert read_finding(out / "erf.json").settings["scale"] == "each"


def test_resolution_as_json(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quickly = ("--seconds", "0", "--no-memory", "--workers", "0")
    run("resolution", "vil_pico", str(data), "--sizes", "48", "32x64", *quickly, "--json")
    table = json.loads(capsys.readouterr().out)["table"]
    assert [row[1] for row in table] == ["32", "32x64", "48"]
    run("resolution", "vil_pico", str(data), "--sizes", "50", "--step", "own", *quickly, "--json")
    assert [row[1] for row in json.loads(capsys.readouterr().out)["table"]] == ["32", "52"]
    with pytest.raises(ConfigError, match="got 'big'"):
        run("resolution", "vil_pico", str(data), "--sizes", "50", "--step", "big")


def test_disagree_of_two_models(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("disagree", "vil_pico", "convformer_pico", str(data), "--workers", "0")
    assert "vil_pico + convformer_pico" in capsys.readouterr().out


def test_disagree_averages_what_was_asked_for(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = ("vil_pico", "convformer_pico")
    run("disagree", *models, str(data), "--workers", "0", "--average", "probabilities", "--json")
    assert json.loads(capsys.readouterr().out)["settings"]["average"] == "probabilities"
    with pytest.raises(SystemExit):
        run("disagree", *models, str(data), "--average", "votes")


def test_errors_come_before_the_work(data: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match="must be a folder"):
        run("erf", "sequencer2d_s", "--data", str(data), "--out", str(blocked))
    with pytest.raises(ConfigError, match="Did you mean"):
        run("erf", "sequencer2d_pico", "--data", str(data), "--at", "stages.11")
    with pytest.raises(DataError, match="does not exist"):
        run("erf", "sequencer2d_pico", "--images", str(tmp_path / "none.png"))
    with pytest.raises(ConfigError, match="such as 384x256"):
        run("resolution", "vil_pico", str(data), "--sizes", "big")


def test_erf_at_a_module_of_timm(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("erf", "timm:test_resnet", "--data", str(data), "--at", "layer1.0", "--image-size", "32", "--json")
    assert [row[1:3] for row in json.loads(capsys.readouterr().out)["table"]] == [["layer1.0", "8x8"]]
    with pytest.raises(ConfigError, match=r"no module 'layer1\.7'.*'layer1\.0'"):
        run("erf", "timm:test_resnet", "--data", str(data), "--at", "layer1.7")
