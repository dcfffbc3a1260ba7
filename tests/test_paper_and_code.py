"""The page of differences: every row is whole, and every option that it names exists."""

import re
import shlex
from pathlib import Path

import pytest

from mixlab.cli import build_parser
from mixlab.cli.arguments import pairs
from mixlab.core.errors import ConfigError
from mixlab.models.zoo import ensemble_row, list_models, model_config, rows
from mixlab.training.recipe import list_recipes, load_recipe

PAGE = (Path(__file__).parent.parent / "docs" / "paper_and_code.md").read_text(encoding="utf-8")
FAMILIES = {"MetaFormer": "metaformer", "Sequencer": "sequencer", "Vision-LSTM": "vision_lstm"}
FAMILIES |= {"HyenaPixel": "hyenapixel", "CoaT": "coat"}
HEADS = ["what", "paper", "released code", "Mixlab", "the other choice"]


def table(title: str) -> list[list[str]]:
    """The cells of a section's table, its header first."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M)
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [cells[0], *cells[2:]]


CODES = [(title, code) for title in FAMILIES for row in table(title)[1:] for code in re.findall(r"`([^`]+)`", row[-1])]


def given(flag: str) -> list[tuple[str, str]]:
    """What commands give behind a flag, with the title of its table."""
    return [(title, code) for title, code in CODES if code.startswith(f"{flag} ")]


@pytest.mark.parametrize("title", FAMILIES)
def test_every_row_says_what_all_three_do(title: str) -> None:
    head, *body = table(title)
    assert head == HEADS
    assert len(body) >= 8
    assert all(len(row) == len(HEADS) and all(row) for row in body)
    assert len({row[0] for row in body}) == len(body)


@pytest.mark.parametrize(("title", "code"), given("--model-set"))
def test_options_of_models_exist(title: str, code: str) -> None:
    names = [name for name in list_models() if rows()[name].get("family") == FAMILIES[title] and not ensemble_row(name)]
    names = names or [name for name in list_models() if not ensemble_row(name)]
    changes = pairs(shlex.split(code)[1:], "--model-set")
    assert any(fits(name, changes) for name in names)


def fits(name: str, changes: dict[str, object]) -> bool:
    try:
        model_config(name, **changes)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(("title", "code"), given("--set"))
def test_changes_of_recipes_exist(title: str, code: str) -> None:
    recipe = "hyenapixel_coco" if "detector" in code else "coat_deformable_detr" if "rate_factors" in code else "digits"
    load_recipe(recipe, changes=pairs(shlex.split(code)[1:], "--set"))


def test_recipes_that_the_page_names_exist() -> None:
    named = [code.split()[1] for _, code in given("--recipe")]
    assert named
    assert set(named) <= set(list_recipes())


def test_other_flags_are_those_of_the_shell() -> None:
    helps = build_parser()._subcommands_action._name_parser_map  # type: ignore[union-attr]
    known = {flag for parser in helps.values() for action in parser._actions for flag in action.option_strings}
    flags = {code.split()[0] for _, code in CODES if code.startswith("--")}
    assert flags <= known
