"""Comparisons of models: the numbers, what they recommend, the tables made from them, and pages of any results."""

from mixlab.findings.results import (
    Budget,
    Comparison,
    ModelResult,
    Point,
    describe_machine,
    read_comparison,
    write_comparison,
)
from mixlab.report.frontier import Recommendation, frontier, recommend
from mixlab.report.page import render_page, write_page
from mixlab.report.report import Report, collect
from mixlab.report.report_page import render_report, write_report
from mixlab.report.table import comparison_rows, csv_text, markdown_text, write_csv, write_markdown

__all__ = [
    "Budget",
    "Comparison",
    "ModelResult",
    "Point",
    "Recommendation",
    "Report",
    "collect",
    "comparison_rows",
    "csv_text",
    "describe_machine",
    "frontier",
    "markdown_text",
    "read_comparison",
    "recommend",
    "render_page",
    "render_report",
    "write_comparison",
    "write_csv",
    "write_markdown",
    "write_page",
    "write_report",
]
