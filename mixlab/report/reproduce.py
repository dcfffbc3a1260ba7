"""The page that says how every row of the papers' tables is made: command, expected figure, cost. All of it from data.

python -m mixlab.report.reproduce > docs/reproduce.md
"""

import fnmatch
import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mixlab.choices import make
from mixlab.config import Reported
from mixlab.evals.compute import TFLOPS, Phase, count_macs, training_compute
from mixlab.papers import OTHER, papers
from mixlab.report.reproduce_costs import downstream_hours
from mixlab.training.recipe import load_recipe
from mixlab.zoo import ensemble_row, model_config, rows

MARK = "<!-- parse only: days on GPUs, and data of your own -->"
ROBUSTNESS_MARK = "<!-- parse only: data of your own -->"
INTRODUCTION = f"""# Reproducing the papers' tables

*`make reproduce` writes this page from `mixlab/configs`: models with the papers' figures, recipes, `tables.toml`.*

Each table has the paper's figures, the recipes that lead to them, and an estimate of the cost. The commands follow in
an order in which they can run; `imagenet`, `ade20k:PATH` and so on are [your copies of the data](data.md).

**The figures are the papers'. None of these trainings has been repeated here: that takes GPUs.** What is tested: the
parameters, multiply-accumulates and logits of the models, and that `mixlab` takes every command below.

GPU hours are arithmetic: three forward passes per training image, two operations per multiply-accumulate, at
{TFLOPS:g} TFLOP/s achieved on each GPU,

    hours = 2 x 3 x MACs(image size) x images x epochs / ({TFLOPS:g} x 10^12 x 3600).

An A100 can do 312 TFLOP/s in bf16 at best. Recurrent and small models get far less than {TFLOPS:g} out of it: read the
column as a lower bound there, and count with a rate of your own (`mixlab bench MODEL --compute --recipe NAME`).
Evaluation is not counted; "all" includes the phases before; a changed model is counted as the unchanged one; detectors
are counted at 800 x 1280 px. Batch sizes are global: see [scale-out](scale.md). To read a result off finished weights:
`mixlab eval runs/.../final.safetensors imagenet`, with `--search-crop` for HyenaPixel, as its authors did.

Figures of DeiT, and of DeiT-III in sizes S and B, are ones that Vision-LSTM cites; it trained DeiT-III-T itself.
"""


@dataclass(frozen=True, kw_only=True)
class Route:
    """The recipes, in order, behind a row of a table."""

    models: str
    phases: tuple[str, ...]
    image_size: int = 224
    pretraining: str | None = None


@dataclass(frozen=True)
class Row:
    """One line: a model (with what is changed), what the paper reports, and the phases that lead there."""

    model: str
    reported: Reported
    phases: tuple[str, ...]
    what: str = ""
    change: str = ""


@functools.cache
def tables() -> dict[str, Any]:
    file = resources.files("mixlab") / "configs" / "tables.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def phases_of(model: str, reported: Reported) -> tuple[str, ...]:
    """The recipes for a row: a route that fits, else the model's own recipe."""
    for entry in tables()["routes"]:
        route: Route = make(Route, entry, "a route of tables.toml")
        asked = (reported.image_size, reported.pretraining)
        if fnmatch.fnmatch(model, route.models) and (route.image_size, route.pretraining) == asked:
            return route.phases
    return (model_config(model).recipe,)


# -- rows ----------------------------------------------------------------------------------------


def paper_rows() -> dict[str, dict[str, list[Row]]]:
    """By paper and table: the models' own rows, then the ablations."""
    found: dict[str, dict[str, list[Row]]] = {key: {} for key in papers()}
    titles = {paper.title.split(":")[0]: key for key, paper in papers().items()}
    for name in rows():
        ensemble = ensemble_row(name)
        about = ensemble or model_config(name)
        for reported in about.reported:
            where, _, table = reported.table.rpartition(", ")  # "HyenaPixel, Table 3" stands in another family's file
            paper = titles[where] if where else OTHER.get(about.family, about.family)
            phases = () if ensemble else phases_of(name, reported)
            found[paper].setdefault(table, []).append(Row(name, reported, phases))
    for entry in tables()["ablations"]:
        for line in entry["lines"]:
            reported = Reported(table=entry["table"], top1=line["top1"])
            row = Row(entry["model"], reported, (entry["recipe"],), line["what"], line["change"])
            found[entry["paper"]].setdefault(entry["table"], []).append(row)
    return found


@functools.cache
def phase(model: str, recipe: str, image_size: int | None = None) -> Phase:
    """What `mixlab train` computes: blocks that stochastic depth drops are masked, not skipped."""
    changes = {} if image_size is None else {"image_size": image_size}
    images = tables()["images"]["imagenet21k" if recipe.endswith("imagenet21k") else "imagenet"]
    return training_compute(model, load_recipe(recipe, model=model, changes=changes), images=images, form="mask")


def own_size(row: Row) -> int | None:
    """The image size to ask for where the last recipe has another one."""
    size = load_recipe(row.phases[-1], model=row.model).image_size
    return row.reported.image_size if size not in (None, row.reported.image_size) else None


def computed(row: Row) -> list[Phase]:
    return [phase(row.model, recipe, own_size(row)) for recipe in row.phases]


# -- commands ------------------------------------------------------------------------------------


def weights(model: str, recipe: str) -> str:
    return f"runs/{model}/{recipe}/final.safetensors"


def training_commands(row: Row, seen: set[str]) -> Iterator[str]:
    """The phases of a row that no row before has run; the last one with the paper's figure."""
    for index, recipe in enumerate(row.phases):
        data = "imagenet21k" if recipe.endswith("imagenet21k") else "imagenet"
        size = own_size(row)
        folder = f"runs/{row.model}/{recipe}" + (f"_{size}" if size else "")
        if row.change:
            folder = f"runs/{row.model}/{re.sub('[^a-z0-9]+', '_', row.what.lower())}"
        before = weights(row.model, row.phases[index - 1])
        start = f"finetune {row.model} {before} {data}" if index else f"train {row.model} {data}"
        told = "" if index < len(row.phases) - 1 else f"  # {row.reported.top1}"
        if folder not in seen:
            size_flag = f" --image-size {size}" if size else ""
            size_flag += " --class-map imagenet21k" if "_from21k" in recipe else ""
            yield f"mixlab {start} --recipe {recipe} --out {folder}{size_flag}{model_set(row.change)}{told}"
        seen.add(folder)


def model_set(change: str) -> str:
    """KEY=VALUE pairs, parted by semicolons, for the shell."""
    return f" --model-set {' '.join(map(quote, change.split('; ')))}" if change else ""


def quote(text: str) -> str:
    return text if re.fullmatch(r"[\w=.]+", text) else f"'{text}'"


def block(lines: Iterable[str], mark: str = MARK) -> list[str]:
    lines = list(lines)
    return ["", mark, "```sh", *lines, "```", ""] if lines else [""]


# -- the page ------------------------------------------------------------------------------------


def grid(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    lines = list(lines)
    full = [index for index in range(len(titles)) if any(line[index] for line in lines)]
    rows = [[line[index] for index in full] for line in (titles, ["---"] * len(titles), *lines)]
    return ["| " + " | ".join(cells) + " |" for cells in rows]


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def trained_section(rows: Sequence[Row], seen: set[str]) -> list[str]:
    """Rows that are trained on ImageNet."""
    lines = []
    for row in rows:
        phases = computed(row)
        hours = [one.gpu_hours(TFLOPS) for one in phases]
        changed = f": {row.what}" if row.what else ""
        macs = number(phases[-1].forward_macs / 1e9) if not row.change else ""
        size = str(row.reported.image_size)
        figures = [number(row.reported.macs), macs, number(hours[-1]), number(sum(hours))]
        recipes = ", then ".join(f"`{recipe}`" for recipe in row.phases)
        lines.append([f"`{row.model}`{changed}", size, f"{row.reported.top1}", recipes, *figures])
    titles = ("model", "px", "top-1 in the paper", "recipes", "GMACs, paper", "counted", "GPU hours", "all")
    return [*grid(titles, lines), *block(line for row in rows for line in training_commands(row, seen))]


def counted_section(rows: Sequence[Row]) -> list[str]:
    """Rows that say only what a model costs."""
    lines, commands = [], []
    for row in rows:
        size = row.reported.image_size
        ours = number(count_macs(row.model, size) / 1e9)
        lines.append([f"`{row.model}`", str(size), number(row.reported.macs), ours])
        commands.append(f"mixlab info {row.model} --image-size {size}")
    return [*grid(("model", "px", "GMACs, paper", "counted"), lines), *block(commands, "<!-- parse only: many -->")]


def ensemble_section(rows: Sequence[Row]) -> list[str]:
    """Nothing to train but the members."""
    lines, commands = [], []
    for row in rows:
        entry = ensemble_row(row.model)
        assert entry is not None
        files = [weights(member, phases_of(member, Reported(table=""))[-1]) for member in entry.members]
        lines.append([f"`{row.model}`", ", ".join(f"`{member}`" for member in entry.members), f"{row.reported.top1}"])
        commands.append(f"mixlab disagree {' '.join(files)} imagenet  # {row.reported.top1}")
    told = "Ensembles take no training of their own: `mixlab disagree` also prints the top-1 of the mean of its models."
    return [told, "", *grid(("ensemble", "members", "top-1 in the paper"), lines), *block(commands)]


def downstream_section(entry: Mapping[str, Any], images: Mapping[str, int]) -> list[str]:
    """From trained weights to other data."""
    lines, commands = [], []
    for model, value in entry["results"].items():
        source = weights(model, phases_of(model, Reported(table=""))[-1])
        changed = [change for start, change in entry.get("change", {}).items() if model.startswith(start)]
        settings = {"change": "".join(changed), "kind": entry.get("set", "").partition("=")[2]}
        hours = downstream_hours(model, entry["recipe"], images[entry["data"]], TFLOPS, **settings)
        lines.append([f"`{model}`", f"{value}", f"`{entry['recipe']}`", number(hours)])
        out = f"runs/{model}/{entry['recipe']}_{entry['data']}" + ("_cascade" if "set" in entry else "")
        rest = (f" --set {entry['set']}" if "set" in entry else "") + "".join(map(model_set, changed))
        commands.append(f"{downstream_command(entry, model, source)} --out {out}{rest}  # {value}")
    return [*grid(("model", f"{entry['measure']} in the paper", "recipe", "GPU hours"), lines), *block(commands)]


def downstream_command(entry: Mapping[str, Any], model: str, source: str) -> str:
    recipe, data = entry["recipe"], entry["data"]
    if data == "vtab":
        return f"mixlab transfer {model} --weights {source} --recipe {recipe} --data vtab/cifar:PATH vtab/dtd:PATH"
    if load_recipe(recipe, model=model).task == "classification":
        return f"mixlab finetune {model} {source} {data}:PATH --recipe {recipe}"
    return f"mixlab train {model} {data}:PATH --recipe {recipe} --weights {source}"


def robustness_section(entry: Mapping[str, Any]) -> list[str]:
    files = [weights(model, phases_of(model, Reported(table=""))[-1]) for model in entry["results"]]
    lines = [[f"`{model}`", *map(str, values)] for model, values in entry["results"].items()]
    command = [f"mixlab robustness {' '.join(files)} imagenet {entry['flags']} --out runs/robustness"]
    return [*grid(("model", *entry["tests"]), lines), *block(command, ROBUSTNESS_MARK)]


def natural(text: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def sections(paper: str, rows: Mapping[str, Sequence[Row]], seen: set[str]) -> dict[str, list[str]]:
    """The tables of a paper, each as lines of Markdown."""
    found: dict[str, list[str]] = {}
    for table in sorted(rows, key=natural):
        trained = [row for row in rows[table] if row.phases and row.reported.top1 is not None]
        counted = [row for row in rows[table] if row.reported.top1 is None]
        ensembles = [row for row in rows[table] if not row.phases]
        lines = trained_section(trained, seen) if trained else []
        lines += ensemble_section(ensembles) if ensembles else []
        found[table] = lines + (counted_section(counted) if counted else [])
    for entry in tables()["downstream"]:
        if entry["paper"] == paper:
            found[entry["table"]] = [*found.get(entry["table"], []), *downstream_section(entry, tables()["images"])]
    for entry in tables()["robustness"]:
        if entry["paper"] == paper:
            found[entry["table"]] = robustness_section(entry)
    return dict(sorted(found.items(), key=lambda item: natural(item[0])))


def page() -> str:
    """The whole page as Markdown."""
    lines, seen, known = [INTRODUCTION], set[str](), paper_rows()
    for key, paper in papers().items():
        lines += [f"## {paper.title}", "", f"{paper.authors[0]} et al., arXiv {paper.arxiv}.", ""]
        for table, part in sections(key, known[key], seen).items():
            lines += [f"### {table}", "", *part]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
