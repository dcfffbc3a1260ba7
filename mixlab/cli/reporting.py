"""`mixlab report`."""

import sys
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from mixlab.core.errors import ConfigError

PAGES = (".html", ".htm")


def report_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="One page of comparisons, training runs and what other verbs wrote with --out: a chart of accuracy "
        "against cost, tables, learning curves, pictures. It needs no network. Example: mixlab report runs/demo "
        "runs/first robustness erf --out report.html"
    )
    parser.add_argument("runs", nargs="+", help="folders, or JSON files in them; a folder of such folders works too")
    parser.add_argument("--out", default="report.html", help="the page, a file that may exist")
    parser.add_argument("--title", default="Mixlab report")
    return parser


def report(arguments: Namespace) -> None:
    """Put results onto one page that needs no network."""
    from mixlab.findings.findings import check_folder
    from mixlab.report.report import collect
    from mixlab.report.report_page import write_report

    target = Path(arguments.out)
    if target.suffix.lower() not in PAGES or target.is_dir():
        raise ConfigError(f"--out is the page to write, a file that ends in .html; got {arguments.out}.")
    found = collect(arguments.runs, title=arguments.title)
    check_folder(target.parent)
    write_report(found, target)
    for lost in found.lost:
        print(f"not on the page, because it is not there: {lost}.svg or {lost}.png", file=sys.stderr)
    counts = {"comparison": found.comparisons, "run": found.runs, "finding": found.instruments}
    told = [f"{len(items)} {name}{'' if len(items) == 1 else 's'}" for name, items in counts.items() if items]
    print(f"{', '.join(told)}; page: {target}")
