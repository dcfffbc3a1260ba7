"""A folder of results with invented numbers and real pictures: what a report is made from."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from mixlab.findings.findings import Finding, Picture, figure, write_finding
from mixlab.report import ModelResult, write_comparison
from tests.report.invented import comparison, model

CORRUPTIONS = ("gaussian_noise", "shot_noise", "defocus_blur", "motion_blur", "snow", "fog", "contrast", "jpeg")
MACHINE = {"processor": "invented", "threads": "2"}


def models() -> tuple[ModelResult, ...]:
    """Four models, of which three are on the frontier of latency; one lacks a measured memory."""
    rows = (
        ("caformer_pico", (97.1, 97.4), 8.0, 960_000, 22_000_000, 44.0, 540.0),
        ("convformer_pico", (96.2, 96.5), 5.0, 1_010_000, 22_600_000, 43.0, 610.0),
        ("sequencer2d_pico", (95.0, 95.8), 12.0, 1_200_000, 31_000_000, None, 220.0),
        ("coat_lite_pico", (93.0, 93.1), 4.0, 745_000, 18_800_000, 32.0, 700.0),
    )
    return tuple(
        model(name, *top1, latency_ms=ms, params=params, macs=macs, peak_mb=peak, images_per_second=speed)
        for name, top1, ms, params, macs, peak, speed in rows
    )


def compared(folder: Path, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"title": "Four models on digits", "command": "mixlab compare '*_pico' --data digits", "machine": MACHINE}
    write_comparison(comparison(*models(), **{**about, **more}), folder / "comparison.json")
    return folder


def trained(folder: Path, *, model: str = "caformer_pico", task: str = "classification", **more: Any) -> Path:
    """A run folder without weights; `more` are fields of its config. `finished=False` leaves out its end."""
    finished = more.pop("finished", True)
    scores: dict[str, dict[str, float]] = {
        "classification": {"top1": 96.5, "top5": 99.8, "val_loss": 0.12},
        "segmentation": {"mIoU": 0.715, "pixel_accuracy": 0.93, "mean_accuracy": 0.81},
        "detection": {"box_AP": 0.412, "box_AP50": 0.655, "mask_AP": -1.0, "mask_AP50": -1.0},
    }
    history = [
        {"epoch": epoch, "train_loss": 2.0 / epoch, "train_seconds": 12.5}
        | {key: value * (1 - 0.3 / epoch) for key, value in scores[task].items()}
        for epoch in (1, 2, 3)
    ]
    folder.mkdir(parents=True)
    row = {"model": model, "data": "digits", "recipe": {"task": task}, "about": {"mixlab": "0", "threads": 2}, **more}
    (folder / "config.json").write_text(json.dumps(row))
    (folder / "metrics.json").write_text(json.dumps(history))
    if finished:
        (folder / "result.json").write_text(json.dumps({"history": history, "best": history[-1], "test": scores[task]}))
    return folder


def robustness(folder: Path, name: str, level: float) -> Path:
    """As `mixlab robustness` writes it: a column per corruption, a row per model."""
    errors = {corruption: round(level + 5.5 * index, 2) for index, corruption in enumerate(CORRUPTIONS)}
    drawn = figure(5, 3)
    drawn.add_subplot().bar([one[:5] for one in errors], list(errors.values()))
    measured = {
        "clean": {"top1": 97.5},
        "corruptions": {one: {"1": {"top1": 102 - error}, "5": {"top1": 98 - error}} for one, error in errors.items()},
        "variants": {},
        "real": None,
        "attacks": [{"kind": "fgsm", "epsilon": 1.0, "top1": 80 - level}],
    }
    found = Finding(
        kind="robustness",
        title=f"Robustness of {name}",
        columns=("model", "clean", "error", *(f"{one} error" for one in CORRUPTIONS), "FGSM 1/255"),
        table=((name, 97.5, sum(errors.values()) / len(errors), *errors.values(), 80 - level),),
        settings={"data": "digits", "severities": [1, 5], "attacks": [{"kind": "fgsm", "epsilon": 1.0}], "crop": None},
        data={"models": {name: measured}},
        pictures=(Picture(name=f"bars_{name}", caption=f"Error of {name} under each corruption"),),
        command=f"mixlab robustness {name} digits --out r",
        machine=MACHINE,
    )
    return write_finding(found, folder, {f"bars_{name}": drawn}).parent


def receptive_fields(folder: Path) -> Path:
    axis = np.linspace(-2, 2, 48)
    y, x = np.meshgrid(axis, axis, indexing="ij")
    fields = {
        "convformer_pico": np.exp(-3 * (x**2 + y**2)),
        "sequencer2d_pico": np.exp(-9 * x**2) + np.exp(-9 * y**2),
        "hpx_former_pico": np.exp(-0.3 * (x**2 + y**2)),
    }
    drawn = figure(9, 3.2)
    for place, (name, field) in enumerate(fields.items()):
        axes = drawn.add_subplot(1, 3, place + 1)
        axes.imshow(field, cmap="viridis")
        axes.set_title(name)
        axes.set_axis_off()
    found = Finding(
        kind="erf",
        title="Effective receptive fields",
        columns=("model", "block", "area of 50 %", "cross"),
        table=tuple((name, "stages.2", 0.11 * (index + 1), index == 1) for index, name in enumerate(fields)),
        settings={"images": 50, "image size": "96 x 96 px"},
        pictures=(Picture(name="erf", caption="What the center of the last map listens to"),),
        command="mixlab erf convformer_pico sequencer2d_pico hpx_former_pico --out erf",
        machine=MACHINE,
    )
    return write_finding(found, folder, {"erf": drawn}).parent


def unknown(folder: Path, **more: Any) -> Path:
    about: dict[str, Any] = {"kind": "weather", "title": "A kind from elsewhere", "columns": ("name", "mm", "note")}
    rows = (("a", 10.5, "wet"), ("b", None, None), ("c", 9, "<i>dry</i>"))
    return write_finding(Finding(**{**about, "table": rows, **more}), folder).parent


def everything(folder: Path) -> list[Path]:
    """One of each."""
    return [
        compared(folder / "compared"),
        trained(folder / "runs" / "first"),
        trained(folder / "runs" / "second", model="sequencer2d_pico", seed=1, finished=False),
        trained(folder / "runs" / "segments", model="convformer_pico", task="segmentation", data="digit-scenes"),
        trained(folder / "runs" / "boxes", model="convformer_pico", task="detection", data="digit-scenes"),
        robustness(folder / "caformer", "caformer_pico", 12.0),
        robustness(folder / "convformer", "convformer_pico", 15.0),
        receptive_fields(folder / "erf"),
        unknown(folder / "weather"),
    ]
