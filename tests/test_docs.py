"""Every Python block in the README and the docs runs."""

import re
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


def test_the_mixer_of_the_contributing_page_meets_the_contract(tmp_path: Path) -> None:
    """The file and the test from the page, put where the page says."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    source, test = (re.sub(r"^   ", "", part, flags=re.M) for part in re.findall(r"```python\n(.*?)```", page, re.S))
    (tmp_path / "shift.py").write_text(source)
    (tmp_path / "test_shift.py").write_text(f"import shift\n{test}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_shift.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=None)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
