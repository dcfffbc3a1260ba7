"""What the verbs of instruments have in common: one way to print and keep what was found."""

import json
from collections.abc import Mapping
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from mixlab.cli.printing import show
from mixlab.findings.findings import Finding, check_folder, show_cell, write_finding


def add_output_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", default=None, help="a folder for JSON, CSV and pictures (SVG and PNG)")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def check_out(arguments: Namespace) -> None:
    """Before long work: what is found can be written."""
    if arguments.out is not None:
        check_folder(arguments.out)


def put_out(found: Finding, arguments: Namespace, figures: Mapping[str, Any] | None = None) -> None:
    """Print the table or the JSON; with --out, write the files."""
    if arguments.out is not None:
        target = write_finding(found, arguments.out, figures)
    if arguments.json:
        print(json.dumps(found.plain(), indent=1))
        return
    numbers = [
        index for index in range(len(found.columns)) if any(isinstance(row[index], int | float) for row in found.table)
    ]
    show(found.columns, [[show_cell(cell) for cell in row] for row in found.table], right=numbers)
    if arguments.out is not None:
        print(f"written: {target}")
