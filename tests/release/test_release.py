"""Files and command lines of release 0.1.0 in its own spelling: each loads, goes on or parses."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import mixlab
from mixlab.cli import build_parser, main
from mixlab.cli.arguments import changes_of
from mixlab.findings.findings import read_finding
from mixlab.models.init import initialise, initialize
from mixlab.training.recipe import load_recipe
from mixlab.training.run import repeat, resume

FILES = Path(__file__).parent / "files"
COMMANDS = (FILES / "commands.txt").read_text(encoding="utf-8").splitlines()


def test_a_recipe_loads() -> None:
    recipe = load_recipe(FILES / "recipe.toml").plain()
    assert (recipe["optimizer"]["lr"], recipe["optimizer"]["clip_norm"]) == (2e-3, 1.0)
    assert recipe["augmentation"]["crop"] == "center"


def test_changes_of_a_recipe_load() -> None:
    keys = {"optimiser.lr": 0.5, "optimiser.layer_decay": 0.9, "augmentation.crop": "centre"}
    recipe = load_recipe("digits", changes=keys).plain()
    assert (recipe["optimizer"]["lr"], recipe["optimizer"]["layer_decay"]) == (0.5, 0.9)
    assert recipe["augmentation"]["crop"] == "center"


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_line_parses(line: str) -> None:
    parsed = build_parser().parse_args(shlex.split(line))
    arguments = parsed[parsed.verb]
    if parsed.verb == "bench":
        assert arguments.optimizer == "adamw"
    if parsed.verb == "export":
        assert arguments.quantize == "int8"
    if parsed.verb in ("train", "finetune", "compare", "transfer") and arguments.set:
        recipe = str(FILES / "recipe.toml") if arguments.get("recipe") else "finetune"
        changes = changes_of(arguments) if "epochs" in arguments else {}
        load_recipe(recipe, changes=changes)


def test_a_stopped_run_goes_on_and_ends_as_it_would_have_then(tmp_path: Path) -> None:
    shutil.copytree(FILES / "stopped", tmp_path / "run")
    result = resume(tmp_path / "run", progress=False)
    expected = json.loads((FILES / "finished" / "result.json").read_text(encoding="utf-8"))
    assert not result.stopped
    assert [row["epoch"] for row in result.history] == [row["epoch"] for row in expected["history"]]
    for row, known in zip(result.history, expected["history"], strict=True):
        assert row["train_loss"] == pytest.approx(known["train_loss"], rel=1e-4)
        assert row["val_loss"] == pytest.approx(known["val_loss"], rel=1e-3)


def test_a_run_is_repeated_from_its_config(tmp_path: Path) -> None:
    config = json.loads((FILES / "finished" / "config.json").read_text(encoding="utf-8"))
    config["recipe"]["schedule"] |= {"epochs": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = repeat(tmp_path / "config.json", tmp_path / "again", progress=False)
    assert len(result.history) == 1


def test_a_finished_run_is_read_with_its_weights(tmp_path: Path) -> None:
    shutil.copytree(FILES / "finished", tmp_path / "run")
    result = resume(tmp_path / "run", progress=False)
    assert result.test is not None
    assert result.model.config.dims == (8, 16, 16, 16)


def test_words_that_were_respelled_are_read() -> None:
    config = mixlab.create_model("vil_pico", dims=[16], depths=[1], pool="centre").config
    assert config.pool.name == "center"
    assert initialise is initialize


def test_weights_load_and_give_the_same_scores() -> None:
    model = mixlab.create_model(weights=FILES / "vil.safetensors").eval()
    image = torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)
    with torch.inference_mode():
        scores = model(image)
    expected = torch.tensor(json.loads((FILES / "vil.json").read_text(encoding="utf-8")))
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    assert model.class_names == tuple(f"class {number}" for number in range(10))


def test_a_finding_goes_onto_a_page(tmp_path: Path) -> None:
    finding = read_finding(FILES / "resolution" / "resolution.json")
    assert finding.kind == "resolution"
    page = tmp_path / "page.html"
    assert main(["report", str(FILES / "resolution"), str(FILES / "finished"), "--out", str(page)]) == 0
    assert "Resolution" in page.read_text(encoding="utf-8")
