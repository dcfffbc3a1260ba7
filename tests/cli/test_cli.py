import json
import subprocess
import sys
from pathlib import Path

import pytest

from mixlab.cli import main


def test_models_prints_a_plain_table_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "caformer_s*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["model", "family"]
    assert lines[1].split() == ["caformer_s18", "metaformer", "sepconv", "attention", "224", "26.3", "4.12", "83.6"]
    assert "\x1b" not in "".join(lines)


def test_models_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["models", "randformer_s12", "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["params"], row["frozen"], row["paper_top1"]) == (11891712, 235298, 76.6)


def test_models_draws_a_chart_of_the_papers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "coat_tiny", "--chart", str(tmp_path / "a.png")]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"written: {tmp_path / 'a.png'}\n"
    assert captured.out.splitlines()[1].startswith("coat_tiny")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert main(["models", "deit_tiny", "--chart", str(tmp_path / "b.svg"), "--measure", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)[0]["name"] == "deit_tiny"
    assert captured.err.startswith("1/1 deit_tiny, 224 px: ")
    assert "images/s on this CPU, batch 1" in (tmp_path / "b.svg").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chart", "nowhere/a.png"], "the folder nowhere does not exist"),
        (["--chart", "a.jpg"], ".svg or .png; got 'a.jpg'"),
        (["--chart", "a"], ".svg or .png; got 'a'"),
        (["--measure"], "add --chart FILE"),
        (["--chart", "a.png", "--batch", "2"], "are for --measure"),
        (["--chart", "a.png", "--measure", "--measured", "bench.json"], "not both"),
        (["--chart", "a.png", "--measure", "--limit-seconds", "0"], "more than 0 seconds; got 0"),
        (["--chart", "a.png", "--measured", "none.json"], "none.json cannot be read"),
    ],
)
def test_a_chart_that_cannot_be_drawn_is_explained(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["models", "vil_tiny", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert not list(tmp_path.iterdir())


def test_a_chart_needs_an_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "vil_pico", "--chart", str(tmp_path / "a.png")]) == 2
    assert "No paper reports an accuracy for vil_pico" in capsys.readouterr().err


def test_info_shows_the_stages_and_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", "caformer_s18", "--image-size", "384x256", "--json"])
    about = json.loads(capsys.readouterr().out)
    assert [part["part"] for part in about["parts"]] == ["stem", *(f"stages.{i}" for i in range(4)), "head"]
    assert [part["output"] for part in about["parts"]][-2:] == [[512, 12, 8], [1000]]
    assert sum(part["params"] for part in about["parts"]) == 26341656
    main(["info", "caformer_s18", "--image-size", "384"])
    out = capsys.readouterr().out
    assert "9 x attention  320 x 24 x 24      16    11.440   8.508" in out
    assert "reported, Table 5, 384 px: 26M params, 13.4G MACs, top-1 85%" in out


def test_info_takes_other_mixers(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", "caformer_pico", "--mixers", "pool,pool,random,identity", "--num-classes", "17"])
    out = capsys.readouterr().out
    assert "4 x random" in out
    assert " 17 " in out.splitlines()[-2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "caformer_s1"], "Unknown model 'caformer_s1'"),
        (["models", "caform"], "No model matches 'caform'"),
        (["info", "caformer_s18", "--image-size", "big"], "such as 384x256; got 'big'"),
        (["info", "caformer_s18", "--mixers", "pool,pool"], "needs 4 entries"),
    ],
)
def test_user_errors_exit_with_2_and_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mixlab: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_the_command_is_installed_and_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m mixlab models 'caformer*' | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("model")
    assert "Traceback" not in done.stderr


def test_a_wrong_flag_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["models", "--jsn"])
    assert caught.value.code == 2
    assert "--jsn" in capsys.readouterr().err
