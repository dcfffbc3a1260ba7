"""The page about the papers' tables says what the data says."""

import re

import pytest

from mixlab.report import counted, reproduce
from mixlab.report.reproduce_costs import downstream_hours
from mixlab.zoo import ensemble_row, model_config, rows
from tests.docs_blocks import ROOT

PAGE = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")


class Free:
    """A phase that costs nothing, where only words are compared."""

    forward_macs = 0

    def gpu_hours(self, tflops: float) -> float:
        return 0.0


def test_the_commands_on_the_page_are_those_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the costs, which take minutes to count: `make reproduce` writes both."""
    monkeypatch.setattr(reproduce, "phase", lambda *_: Free())
    monkeypatch.setattr(reproduce, "count_macs", lambda *_: 0)
    monkeypatch.setattr(reproduce, "downstream_hours", lambda *_, **__: 0.0)
    words = re.compile(r"^(?:mixlab .*|#+ .*|[A-Z*].*)$", re.M)
    assert words.findall(reproduce.page()) == words.findall(PAGE)


def test_every_figure_of_every_model_is_on_the_page() -> None:
    for name in rows():
        for reported in (ensemble_row(name) or model_config(name)).reported:
            if reported.top1 is not None:
                assert re.search(rf"^\| `{name}` \|.* {reported.top1} \|", PAGE, re.M), (name, reported)


@pytest.mark.parametrize("name", ["vil_tiny", "convformer_s18"])
def test_the_hours_on_the_page_are_counted(name: str) -> None:
    tables = [rows for paper in reproduce.paper_rows().values() for rows in paper.values()]
    row = next(row for rows in tables for row in rows if row.model == name)
    (line,) = reproduce.trained_section([row], set())[2:3]
    assert line.split("|")[-2] != " 0 "
    assert " ".join(line.split()) in " ".join(PAGE.split())


def test_hours_follow_the_formula() -> None:
    one = reproduce.phase("vil_tiny", "vision_lstm_imagenet_192")
    expected = 2 * 3 * one.forward_macs * 1_281_167 * 800 / (100e12 * 3600)
    assert one.gpu_hours(100.0) == pytest.approx(expected)


def test_a_segmenter_costs_its_updates() -> None:
    from mixlab import create_segmenter, macs

    model = create_segmenter("vil_tiny", num_classes=150, width=192)
    hours = 6 * macs(model, 512) * 160_000 * 16 / (100e12 * 3600)
    assert downstream_hours("vil_tiny", "vision_lstm_ade20k", 20_210, 100.0) == pytest.approx(hours)


def test_detectors_of_every_kind_cost_their_epochs() -> None:
    hours = [
        downstream_hours("coat_lite_small", name, 118_287, 100.0) for name in ("coat_coco_1x", "coat_deformable_detr")
    ]
    assert 0 < hours[0] < hours[1]


@pytest.mark.parametrize(("page", "name"), [("choosing.md", "mixers"), ("scale.md", "trainings")])
def test_counted_tables_are_what_counting_gives(page: str, name: str) -> None:
    """The first rows; `make reproduce` writes all."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (found,) = [match for match in counted.MARK.finditer(text) if match[2] == name]
    titles, row, keys = counted.TABLES[name]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[3].splitlines()]
    assert lines[0] == list(titles)
    assert [line[0] for line in lines[2:]] == [f"`{key}`" for key in keys]
    for key, line in list(zip(keys, lines[2:], strict=True))[:3]:
        assert row(key) == line
