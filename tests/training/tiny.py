"""Runs that are over in a moment: a tiny model on some of the digits."""

import os
import signal
from pathlib import Path
from typing import Any

import torch

from mixlab.training.loop import Callback, Trainer
from mixlab.training.run import RunResult, train

OPTIONS: dict[str, Any] = {"dims": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
CHANGES: dict[str, Any] = {"batch_size": 128, "schedule.epochs": 2, "schedule.warmup_epochs": 1, "evaluate_every": 1}


class Interrupt(Callback):
    """Ctrl-C after some updates."""

    def __init__(self, update: int, number: int = signal.SIGINT) -> None:
        self.at, self.number = update, number

    def update(self, run: Trainer, loss: float, lr: float) -> None:
        if run.update == self.at:
            os.kill(os.getpid(), self.number)


def tiny(out: Path, *, changes: dict[str, Any] | None = None, **settings: Any) -> RunResult:
    common = {"options": OPTIONS, "workers": 0, "tensorboard": False, "progress": False, "device": "cpu"}
    merged = {**CHANGES, **(changes or {})}
    return train("caformer_pico", "digits", out=out, recipe="digits", changes=merged, **{**common, **settings})


def weights(run: RunResult) -> dict[str, torch.Tensor]:
    return run.model.state_dict()


def same_weights(one: RunResult, other: RunResult) -> bool:
    return all(torch.equal(value, weights(other)[key]) for key, value in weights(one).items())
