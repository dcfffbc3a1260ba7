"""Every block of code in the README and the docs runs, or is marked and the real parsers take it."""

import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from PIL import Image

import mixlab
from mixlab.data import open_data
from mixlab.training.recipe import load_recipe
from tests.docs_blocks import OUTPUT, PAGES, ROOT, Block, blocks, check, environment, run

PYTHON = [block for block in blocks() if block.language == "python" and block.page != "CONTRIBUTING.md"]
PARSED = [block for block in blocks() if block.is_shell and block.parse_only]
QUICK_PAGES = ("README.md", "guide.md", "hyena.md", "vision-lstm.md")  # the others: `make docs-test`
STORY = "index.md"  # its blocks follow from each other
RUN = [block for block in blocks() if block.is_shell and not block.parse_only and block.page != STORY]


def kind(block: Block) -> str:
    if block.is_shell:
        return "parsed" if block.parse_only else "run"
    return {"python": "python", "toml": "toml"}.get(block.language, "output" if block.language in OUTPUT else "unknown")


def test_no_block_is_passed_over() -> None:
    """Counted by the fences themselves: each block has a kind that a test below takes."""
    fences = sum(len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.M)) for page in PAGES)
    kinds = collections.Counter(map(kind, blocks()))
    assert kinds.total() == fences / 2
    assert not [block.name for block in blocks() if kind(block) == "unknown"]
    assert min(kinds[name] for name in ("python", "run", "parsed", "toml")) > 0


EXAMPLE_PAGES = [
    pytest.param(page, marks=() if page in QUICK_PAGES else pytest.mark.heavy)
    for page in sorted({block.page for block in PYTHON})
]


@pytest.mark.parametrize("page", EXAMPLE_PAGES)
def test_the_documented_examples_of_a_page_run(page: str, tmp_path: Path) -> None:
    """Each in names of its own; one process for all, because most of the time goes into imports."""
    examples = [[block.name, block.text] for block in PYTHON if block.page == page]
    code = "import json, sys\nfor name, text in json.load(sys.stdin):\n"
    code += "    exec(compile(text, name, 'exec'), {'__name__': '__main__'})\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(examples),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", PARSED, ids=lambda block: block.name)
def test_the_parsers_take_what_is_too_long_to_run(block: Block) -> None:
    assert check(block) > 0


@pytest.mark.parametrize("block", [block for block in blocks() if block.language == "toml"], ids=lambda one: one.name)
def test_a_documented_recipe_file_is_a_recipe(block: Block, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(block.text)
    name = tomllib.loads(block.text)["base"].removesuffix("_imagenet_384") + "_s18"
    assert load_recipe(tmp_path / "mine.toml", model=name).batch_size == tomllib.loads(block.text)["batch_size"]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages take for granted: a weight file and pictures."""
    folder = tmp_path_factory.mktemp("workshop")
    (folder / "run").mkdir()
    model = mixlab.create_model("hpx_former_pico", num_classes=10, dims=[8, 16, 16, 16], depths=[1, 1, 1, 1])
    model.class_names = open_data("digits", "val").class_names
    mixlab.save_weights(model, folder / "run" / "final.safetensors")
    for name in ("one.jpg", "two.png", "cat.jpg", "dog.jpg"):
        Image.new("RGB", (48, 32), "teal").save(folder / name)
    return folder


@pytest.mark.parametrize(
    "block",
    [pytest.param(one, marks=[] if one.page == "README.md" else pytest.mark.heavy, id=one.name) for one in RUN],
)
def test_documented_commands_run(block: Block, workshop: Path) -> None:
    run(block, workshop)


@pytest.mark.heavy
def test_the_first_five_minutes_run_in_their_order(tmp_path: Path) -> None:
    """Train, predict, look, export, serve: what a new user types, in one folder."""
    for block in (one for one in blocks() if one.page == STORY and not one.parse_only):
        if block.language == "python":
            done = subprocess.run(
                [sys.executable, "-c", block.text], cwd=tmp_path, env=environment(), capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
        else:
            run(block, tmp_path)
    for made in ("runs/first/final.safetensors", "digit.png", "look", "first.onnx"):
        assert (tmp_path / made).exists()


def test_the_mixer_of_the_contributing_page_works_where_the_page_says(tmp_path: Path) -> None:
    """A copy of the tree with the page's file and test in it: the contract holds and the last command runs."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    source, test = (block.text for block in blocks() if block.page == "CONTRIBUTING.md" and block.language == "python")
    for folder in ("mixlab", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "mixlab" / "models" / "mixers" / "shift.py").write_text(source)
    (tmp_path / "tests" / "models" / "mixers" / "test_shift.py").write_text(test)
    (command,) = re.findall(r"`mixlab (info .*?--mixers shift.*?)`", page)
    for arguments in (["pytest", "-q", "tests/models/mixers/test_shift.py"], ["mixlab", *command.split()]):
        done = subprocess.run(
            [sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert "3 x shift" in done.stdout


def test_links_between_pages_and_to_files_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http", "#")) and not (page.parent / target.partition("#")[0]).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    for name in ("docs", "mixlab"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    told = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"], cwd=tmp_path, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages <= {page.stem for page in (tmp_path / "site").glob("*.html")}
    assert "push_to_hub" in (tmp_path / "site" / "api.html").read_text(encoding="utf-8")


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "zensical.toml").read_text()
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f'"{page.name}"' not in menu]
