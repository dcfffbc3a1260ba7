"""The page about the papers' tables says what the data says, and holds every table, figure and recipe."""

import re
from collections.abc import Iterable

import pytest

from mixlab.models.papers import papers
from mixlab.models.zoo import ensemble_row, model_config, rows
from mixlab.training.recipe import list_recipes, load_recipe
from mixlab.training.routes import phases_of
from tests.docs_blocks import ROOT
from tools import counted
from tools.reproduce import costs
from tools.reproduce.page import page
from tools.reproduce.rows import sections_of
from tools.reproduce.sections import Accuracies, Transfers
from tools.reproduce.tables import Target, numbers_of, paper_tables
from tools.reproduce.trainings import Training, training_commands, training_of, transfer_commands

PAGE = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
COCO = Target(data="coco", recipe="coat_coco_1x")
ADE20K = Target(data="ade20k", recipe="vision_lstm_ade20k")


def test_the_commands_and_figures_on_the_page_are_those_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the costs, which take minutes to count: `make reproduce` writes both."""
    free = costs.TrainingCosts(0.0, (0.0,))
    monkeypatch.setattr(costs, "training_costs", lambda *_: free)
    monkeypatch.setattr(costs, "gmacs", lambda *_: 0.0)
    monkeypatch.setattr(costs, "transfer_hours", lambda *_: 0.0)
    assert without_costs(page()) == without_costs(PAGE)


def without_costs(text: str) -> list[str]:
    """The lines of a page, the columns of its grids that are counted left empty."""
    lines, kept = [], [False]
    for line in text.splitlines():
        if line.startswith("|"):
            cells = line.split("|")
            if not kept[0]:  # the titles
                kept = [cell.strip() not in ("counted", "GPU hours", "all") for cell in cells]
            lines.append("|".join(cell for cell, keep in zip(cells, kept, strict=True) if keep))
        else:
            lines.append(line)
            kept = [False]
    return lines


def test_every_figure_of_every_model_is_on_the_page() -> None:
    for name in rows():
        for reported in (ensemble_row(name) or model_config(name)).reported:
            if reported.top1 is not None:
                assert re.search(rf"^\| `{name}` \|.* {reported.top1} \|", PAGE, re.M), (name, reported)


def test_every_published_recipe_is_on_the_page() -> None:
    published = [name for name in list_recipes() if not load_recipe(name).source.startswith("Mixlab")]
    assert len(published) > 30
    assert [name for name in published if f"--recipe {name} " not in PAGE] == []


@pytest.mark.parametrize("paper", papers())
def test_every_table_and_figure_is_on_the_page_or_left_out_for_a_reason(paper: str) -> None:
    tables = paper_tables()[paper]
    every = {("Table", number + 1) for number in range(tables.tables)}
    every |= {("Figure", number + 1) for number in range(tables.figures)}
    shown, left_out = numbered(sections_of(paper)), numbered(tables.left_out)
    assert shown | left_out == every
    assert not shown & left_out
    assert min(map(len, tables.left_out.values())) > 10
    start = PAGE.index(f"## {papers()[paper].title}")
    section = PAGE[start : PAGE.find("\n## ", start)] if "\n## " in PAGE[start:] else PAGE[start:]
    assert all(f"### {title}\n" in section for title in sections_of(paper))
    assert all(f"- {title}: {reason}." in section for title, reason in tables.left_out.items())


def numbered(titles: Iterable[str]) -> set[tuple[str, int]]:
    return {(kind, number) for kind, numbers in map(numbers_of, titles) for number in numbers}


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("Table 3, CIFAR-10", ("Table", {3})),
        ("Table 2a", ("Table", {2})),
        ("Tables 4 and 5", ("Table", {4, 5})),
        ("Figures 7 to 9, 11 and 12", ("Figure", {7, 8, 9, 11, 12})),
    ],
)
def test_titles_count_tables_and_figures(title: str, expected: tuple[str, set[int]]) -> None:
    assert numbers_of(title) == expected


def test_results_have_a_figure_for_every_column() -> None:
    for tables in paper_tables().values():
        for transfer in tables.transfers:
            count = len(transfer.to.measures) + len(transfer.to.evaluated)
            assert {len(figures) for figures in transfer.results.values()} == {count}, transfer.table
        for measured in tables.measurements:
            assert {len(figures) for figures in measured.results.values()} <= {len(measured.columns)}, measured.table
        for ablation in tables.ablations:
            assert {len(line.then) for line in ablation.lines} <= {0, len(ablation.then)}, ablation.table


# -- commands ------------------------------------------------------------------------------------


def test_a_model_without_a_recipe_starts_from_its_public_weights() -> None:
    """DeiT-III-T is Vision-LSTM's own training; its sizes S and B are cited."""
    assert phases_of("deit3_tiny") == ("deit3_imagenet_192", "deit3_imagenet_224")
    assert phases_of("deit3_small") == phases_of("deit3_base") == ()
    assert not re.search(r"deit3_(small|base) .*--recipe deit3", PAGE)
    small = training_of("deit3_small")
    assert (small.weights, small.subject) == ("released", "deit3_small=released")
    (command,) = transfer_commands(small, ADE20K, {}, "Table 2", [])
    assert "--weights released" in command


def test_backbones_of_timm_start_from_their_own_weights() -> None:
    peer = training_of("timm:resnet50.tv_in1k")
    assert (peer.weights, peer.subject) == ("pretrained", "timm:resnet50.tv_in1k=pretrained")
    (command,) = transfer_commands(peer, COCO, {}, "Table 3", [])
    assert command.startswith("mixlab train timm:resnet50.tv_in1k coco:PATH --recipe coat_coco_1x --weights pretrained")


def test_a_run_has_its_command_once() -> None:
    printed: dict[str, str] = {}
    first = list(training_commands(training_of("vil_tiny"), printed, "Table 1", figure="78.3"))
    assert len(first) == 2
    assert first[-1].endswith("  # 78.3")
    assert not list(training_commands(training_of("vil_tiny"), printed, "Table 7", figure="78.3"))
    assert printed["runs/vil_tiny/vision_lstm_imagenet_224"] == "Table 1"


def test_changed_models_have_folders_of_their_own() -> None:
    changed = Training(model="vil_tiny", phases=("vision_lstm_ablation_100",), change="a=1; b=[2]", folder_name="other")
    (trained,) = training_commands(changed, {}, "Table 4", figure="1.0")
    assert trained.endswith("--out runs/vil_tiny/other/vision_lstm_ablation_100 --model-set a=1 'b=[2]'  # 1.0")
    (transferred,) = transfer_commands(changed, ADE20K, {}, "Table 4", [])
    assert "--weights runs/vil_tiny/other/vision_lstm_ablation_100/final.safetensors" in transferred
    assert "--out runs/vil_tiny/other/vision_lstm_ade20k --model-set a=1 'b=[2]'" in transferred


# -- costs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vil_tiny", "convformer_s18"])
def test_the_hours_on_the_page_are_counted(name: str) -> None:
    parts = [part for paper in papers() for parts in sections_of(paper).values() for part in parts]
    row = next(row for part in parts if isinstance(part, Accuracies) for row in part.rows if row.model == name)
    line = Accuracies(table="Table 1", rows=[row]).lines({})[2]
    assert line.split("|")[-2] != " 0 "
    assert " ".join(line.split()) in " ".join(PAGE.split())


def test_the_hours_of_a_transfer_on_the_page_are_counted() -> None:
    parts = sections_of("coat")["Table 3, 1x"]
    (part,) = [part for part in parts if isinstance(part, Transfers)]
    (line,) = [line for line in part.lines({}) if line.startswith("| `timm:resnet50.tv_in1k`")]
    assert line in PAGE.splitlines()


def test_hours_follow_the_formula() -> None:
    phase = costs.phase("vil_tiny", "vision_lstm_imagenet_192")
    expected = 2 * 3 * phase.forward_macs * 1_281_167 * 800 / (100e12 * 3600)
    assert phase.gpu_hours(100.0) == pytest.approx(expected)


def test_changed_models_are_counted_as_they_are() -> None:
    whole, changed = (
        costs.phase("vil_tiny", "vision_lstm_ablation_100", None, change) for change in ("", "depths=[12]")
    )
    assert changed.forward_macs < 0.6 * whole.forward_macs


def test_a_segmenter_costs_its_updates() -> None:
    from mixlab import create_segmenter, macs

    model = create_segmenter("vil_tiny", num_classes=150, width=192)
    hours = 6 * macs(model, 512) * 160_000 * 16 / (100e12 * 3600)
    assert costs.transfer_hours(training_of("vil_tiny"), ADE20K) == pytest.approx(hours)


def test_detectors_of_every_kind_cost_their_epochs() -> None:
    targets = [COCO, Target(data="coco", recipe="coat_deformable_detr")]
    hours = [costs.transfer_hours(training_of("coat_lite_small"), target) for target in targets]
    assert 0 < hours[0] < hours[1]


@pytest.mark.parametrize(("file", "name"), [("choosing.md", "mixers"), ("scale.md", "trainings")])
def test_counted_tables_are_what_counting_gives(file: str, name: str) -> None:
    """The first rows; `make reproduce` writes all."""
    text = (ROOT / "docs" / file).read_text(encoding="utf-8")
    (found,) = [match for match in counted.MARK.finditer(text) if match[2] == name]
    titles, row, keys = counted.TABLES[name]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[3].splitlines()]
    assert lines[0] == list(titles)
    assert [line[0] for line in lines[2:]] == [f"`{key}`" for key in keys]
    for key, line in list(zip(keys, lines[2:], strict=True))[:3]:
        assert row(key) == line
