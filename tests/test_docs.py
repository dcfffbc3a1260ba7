"""Every Python block in the README and the docs runs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{index}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_documented_example_runs(block: str) -> None:
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_mixer_of_the_contributing_page_works_where_the_page_says(tmp_path: Path) -> None:
    """A copy of the tree with the page's file and test in it: the contract holds and the last command runs."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    source, test = (re.sub(r"^   ", "", part, flags=re.M) for part in re.findall(r"```python\n(.*?)```", page, re.S))
    for folder in ("mixlab", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "mixlab" / "mixers" / "shift.py").write_text(source)
    (tmp_path / "tests" / "mixers" / "test_shift.py").write_text(test)
    (command,) = re.findall(r"`mixlab (info .*?--mixers shift.*?)`", page)
    for arguments in (["pytest", "-q", "tests/mixers/test_shift.py"], ["mixlab", *command.split()]):
        done = subprocess.run(
            [sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert "3 x shift" in done.stdout
