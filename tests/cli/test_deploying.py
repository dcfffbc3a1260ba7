import json
from pathlib import Path

import pytest
import torch

import mixlab
from mixlab.cli.deploying import export, export_parser
from mixlab.core.errors import ConfigError
from mixlab.deploy.export import open_export

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "final.safetensors"
    mixlab.save_weights(mixlab.create_model("convformer_pico", dims=[8, 8], depths=[1, 1], mixers="pool",
                                            branch_scale="none", num_classes=10), path)  # fmt: skip
    return path


def run(*arguments: object) -> None:
    export(export_parser().parse_args([str(argument) for argument in arguments]))


def test_it_says_what_was_written_and_how_far_it_is_from_pytorch(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(weights, "--out", tmp_path / "m.onnx", "--image-size", "32x48", "--data", "digits", "--split", "val")
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert "onnx" in lines[0]
    assert "any number of images of 32 x 48 px" in lines[0]
    assert lines[1].startswith("largest difference from PyTorch ")
    assert lines[2].startswith("top-1 ")
    assert lines[2].endswith("(+0.00)")
    assert captured.err == ""  # no progress into pipes
    assert open_export(tmp_path / "m.onnx").run(torch.randn(2, 3, 32, 48)).shape == (2, 10)


def test_json_for_programs(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.pt2"
    run(weights, "--format", "torch_export", "--batch", "2", "--out", out, "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["batch"], found["bytes"]) == (str(out), 2, out.stat().st_size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing: --out"),
        (["--out", "m.onnx", "--batch", "many"], "'dynamic' or a number of images; got 'many'"),
        (["--out", "m.onnx", "--image-size", "big"], "such as 384x256; got 'big'"),
        (["--out", "m.onnx", "--format", "tflite"], "Unknown export format 'tflite'"),
        (["--out", "/proc/m.onnx"], "Cannot write into /proc"),
    ],
)
def test_user_errors(arguments: list[str], message: str, weights: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(weights, *arguments)
