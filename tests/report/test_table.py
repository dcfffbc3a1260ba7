import csv
from pathlib import Path

import pytest

from mixlab.report import comparison_rows, csv_text, markdown_text, write_csv, write_markdown
from mixlab.report.costs import short, show_count, show_time
from tests.report.invented import comparison, model, several

TWO = comparison(
    model("cheap", 96.0, 97.0, latency_ms=2.5, frozen=5_000), model("best", 98.0, 99.0, latency_ms=12.0, peak_mb=None)
)


def test_rows_are_texts_sorted_by_accuracy() -> None:
    header, rows = comparison_rows(TWO)
    assert header == ["model", "top-1 %", "parameters", "MACs", "images/s", "latency", "peak memory", "training"]
    assert rows[0] == ["best", "98.50 ± 0.71", "1.00 M", "20.0 M", "400", "12.0 ms", "-", "1 min 15 s"]
    assert rows[1][:3] == ["cheap", "96.50 ± 0.71", "1.00 M + 5.00 k"]


def test_columns_without_any_value_are_left_out() -> None:
    header, rows = comparison_rows(comparison(model("a", 96.0, peak_mb=None), model("b", peak_mb=None)))
    assert "peak memory" not in header
    assert rows[1][1] == "-"


def test_markdown_marks_the_best() -> None:
    lines = markdown_text(TWO).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "**98.50 ± 0.71**" in lines[2]
    assert "**2.50 ms**" in lines[3]
    assert "**" not in markdown_text(several(1, 1))


def test_csv_holds_plain_numbers(tmp_path: Path) -> None:
    write_csv(TWO, tmp_path / "table.csv")
    write_markdown(TWO, tmp_path / "table.md")
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == markdown_text(TWO)
    assert (tmp_path / "table.csv").read_text() == csv_text(TWO)
    rows = list(csv.DictReader(csv_text(TWO).splitlines()))
    assert [row["model"] for row in rows] == ["best", "cheap"]
    assert (float(rows[1]["top1"]), rows[1]["seeds"], rows[1]["frozen"], rows[0]["peak_mb"]) == (96.5, "2", "5000", "")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (999, "999"),
        (1234, "1.23 k"),
        (12_340_000, "12.3 M"),
        (4.8e9, "4.80 G"),
        (2e12, "2.00 T"),
        (7.5e15, "7.50 P"),
        (3e20, "300 E"),
    ],
)
def test_counts_as_people_read_them(value: float, text: str) -> None:
    assert show_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(9.5, "9.50 s"), (59.99, "60.0 s"), (65.2, "1 min 05 s"), (7322, "2 h 02 min")]
)
def test_times_as_people_read_them(seconds: float, text: str) -> None:
    assert show_time(seconds) == text


@pytest.mark.parametrize(("text", "result"), [("9.00 ms", "9 ms"), ("9.50 ms", "9.5 ms"), ("100 ms", "100 ms")])
def test_round_numbers_are_short(text: str, result: str) -> None:
    assert short(text) == result
