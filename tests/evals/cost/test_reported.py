from pathlib import Path
from typing import Any

import pytest

from mixlab.core.errors import ConfigError
from mixlab.evals.cost import reported
from mixlab.evals.cost.reported import (
    ReportedPoint,
    family_of,
    measure_speeds,
    points_of,
    read_speeds,
    with_speeds,
)
from mixlab.evals.cost.reported_figure import draw_reported, lines_of, looks_of
from mixlab.findings.findings import finding, write_finding


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("vil_tiny", ("vil", False)),
        ("coat_lite_mini", ("coat_lite", False)),
        ("caformer_b36", ("caformer", False)),
        ("sequencer2d_s_add", ("sequencer2d", True)),
        ("sequencer2d_l_x1_3", ("sequencer2d", True)),
        ("identityformer_s_iso", ("identityformer", True)),
    ],
)
def test_a_family_is_what_stands_before_the_size(name: str, family: tuple[str, bool]) -> None:
    assert family_of(name) == family


def test_every_reported_accuracy_is_a_point_with_counted_costs() -> None:
    points = points_of("caformer_s18")
    assert [(one.image_size, one.pretraining, one.top1) for one in points] == [
        (224, None, 83.6),
        (384, None, 85.0),
        (224, "imagenet-21k", 84.1),
        (384, "imagenet-21k", 85.4),
    ]
    assert {one.params for one in points} == {26341656}
    assert [round(one.macs / 1e9, 1) for one in points[:2]] == [4.1, 13.4]  # the paper's


def test_frozen_parameters_count() -> None:
    assert points_of("randformer_s12")[0].params == 11891712 + 235298


def test_lines_join_sizes_of_a_family_and_leave_ablations_alone() -> None:
    lines = lines_of(points_of("sequencer2d_[ml]*") + points_of("sequencer2d_s_add"))
    assert [[(one.model, one.image_size) for one in line] for line in lines] == [
        [("sequencer2d_m", 224), ("sequencer2d_l", 224)],
        [("sequencer2d_l_x1_3", 224)],
        [("sequencer2d_s_add", 224)],
        [("sequencer2d_l", 392)],
    ]


def test_families_are_told_apart() -> None:
    looks = looks_of(points_of())
    assert len(looks) > 20
    assert len(set(looks.values())) == len(looks)


def test_throughput_has_a_panel_if_it_was_measured() -> None:
    points = points_of("vil_*")
    titles = [axes.get_title(loc="left") for axes in draw_reported(points).axes]
    assert titles == ["parameters, millions", "multiply-accumulates, billions"]
    drawn = draw_reported(with_speeds(points, {("vil_tiny", 224): 20.0}), speed_label="images/s here")
    assert drawn.axes[2].get_title(loc="left") == "images/s here"
    assert [line.get_xydata().tolist() for line in drawn.axes[2].lines] == [[[20.0, 78.3]]]


def test_other_sizes_and_larger_pretraining_are_marked() -> None:
    drawn = draw_reported(points_of("caformer_*"))
    faces = {(line.get_markerfacecolor() == "white", line.get_linestyle()) for line in drawn.axes[0].lines}
    assert faces == {(False, "-"), (False, "--"), (True, "-"), (True, "--")}
    assert [text.get_text() for text in drawn.axes[0].texts] == ["384", "384"]
    names = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert names == ["caformer", "image size beside the mark, else 224 px", "hollow: pretrained on imagenet-21k"]


def point(model: str, macs: int) -> ReportedPoint:
    about: dict[str, Any] = {"family": "convformer", "changed": False, "pretraining": None, "top1": 70.0, "params": 1}
    return ReportedPoint(model=model, image_size=32, macs=macs, **about)


def test_measuring_begins_with_the_small_ones_and_stops_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    points, told = [point("convformer_pico", 2), point("caformer_pico", 1)], list[str]()
    found = measure_speeds(points, seconds=0.02, tell=told.append)
    assert list(found) == [("caformer_pico", 32), ("convformer_pico", 32)]
    assert min(found.values()) > 0
    assert told[0].startswith("1/2 caformer_pico, 32 px: ")
    clock = iter([0.0, 0.0, 9.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock, 10.0))
    monkeypatch.setattr(reported, "measure_speed", lambda *_, **__: type("", (), {"images_per_second": 1.0}))
    assert list(measure_speeds(points, limit_seconds=5, tell=told.append)) == [("caformer_pico", 32)]
    assert told[-1] == "the limit of 5 seconds is over: 1 are not measured"
    with pytest.raises(ConfigError, match="more than 0 seconds; got 0"):
        measure_speeds(points, limit_seconds=0)


def test_speeds_of_mixlab_bench(tmp_path: Path) -> None:
    plain = {"mode": "inference", "dtype": "float32", "compiled": False, "image_size": [224, 224]}
    rows = [
        {**plain, "model": "vil_tiny", "batch": 1, "images_per_second": 10.0},
        {**plain, "model": "vil_tiny", "batch": 8, "images_per_second": 12.0},
        {**plain, "model": "vil_tiny", "images_per_second": 99.0, "compiled": True},
        {**plain, "model": "vil_base", "images_per_second": 5.0, "dtype": "tf32"},
        {**plain, "model": "vil_base", "images_per_second": 50.0, "dtype": "bfloat16"},
        {**plain, "model": "vil_small", "images_per_second": None},
    ]
    path = write_finding(finding("bench", "t", ("a",), [], data={"rows": rows}), tmp_path)
    points = points_of("vil_*")
    assert read_speeds(path, points) == {("vil_tiny", 224): 12.0, ("vil_base", 224): 5.0}
    with pytest.raises(ConfigError, match=r"none of the models that are shown.*--sizes 224"):
        read_speeds(path, points_of("coat_tiny"))
    with pytest.raises(ConfigError, match="finding of `mixlab erf`"):
        read_speeds(write_finding(finding("erf", "t", ("a",), []), tmp_path), points)


def test_what_no_paper_reports_cannot_be_drawn() -> None:
    with pytest.raises(ConfigError, match="No paper reports an accuracy for vil_pico: there is nothing to draw"):
        points_of("vil_pico")
    with pytest.raises(ConfigError, match="No model matches 'vill_tiny'"):
        points_of("vill_tiny")
