"""The scripts in examples/ run as a user would start them and say what they promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs_blocks import ROOT, environment

EXAMPLES = {
    "first_steps.py": [],
    "train_on_a_folder.py": ["--epochs", "4"],
    "custom_mixer.py": [],
    "hybrid_to_onnx.py": ["--epochs", "2"],
}


def output_of(name: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *EXAMPLES[name]],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


def test_first_steps_shows_two_models(tmp_path: Path) -> None:
    assert output_of("first_steps.py", tmp_path).count("logits   (1, 10)") == 2


def test_a_folder_of_images_is_learned(tmp_path: Path) -> None:
    told = output_of("train_on_a_folder.py", tmp_path)
    (top1,) = re.findall(r"val top-1 ([\d.]+)% after 4 epochs", told)
    assert float(top1) > 30  # chance is 10
    assert re.search(r"0/\d+\.png: \('\d', [\d.e-]+\)", told)


def test_a_mixer_of_ones_own_works_at_any_size(tmp_path: Path) -> None:
    assert len(re.findall(r"^axial .* scores \(1, 10\)", output_of("custom_mixer.py", tmp_path), re.M)) == 1


@pytest.mark.heavy
def test_a_hybrid_says_the_same_in_onnxruntime(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    told = output_of("hybrid_to_onnx.py", tmp_path)
    torch_top1, onnx_top1 = re.findall(r"top-1 ([\d.]+)% in PyTorch, ([\d.]+)% in ONNX", told)[0]
    assert torch_top1 == onnx_top1
    ours, theirs = re.findall(r"\[[\d, ]+\]", told)
    assert ours == theirs
