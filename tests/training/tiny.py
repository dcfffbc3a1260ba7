"""Runs that are over in a moment: a tiny model on some of the digits."""

from pathlib import Path
from typing import Any

import torch

from mixlab.training.run import RunResult, train

OPTIONS: dict[str, Any] = {"dims": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
CHANGES: dict[str, Any] = {"batch_size": 128, "schedule.epochs": 2, "schedule.warmup_epochs": 1, "evaluate_every": 1}


def tiny(out: Path, *, changes: dict[str, Any] | None = None, **settings: Any) -> RunResult:
    common = {"options": OPTIONS, "workers": 0, "tensorboard": False, "progress": False, "device": "cpu"}
    merged = {**CHANGES, **(changes or {})}
    return train("caformer_pico", "digits", out=out, recipe="digits", changes=merged, **{**common, **settings})


def weights(run: RunResult) -> dict[str, torch.Tensor]:
    return run.model.state_dict()


def same_weights(one: RunResult, other: RunResult) -> bool:
    return all(torch.equal(value, weights(other)[key]) for key, value in weights(one).items())
