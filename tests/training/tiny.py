"""Runs that are over in a moment: a tiny model on some of the digits."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

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


def dark_and_bright(folder: Path, each: int = 4) -> Path:
    """Pictures of noise, so many for each of two classes, in train and val."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label, darkest in (("bright", 128), ("dark", 0)):
            (folder / split / label).mkdir(parents=True)
            for index in range(each):
                pixels = rng.integers(darkest, darkest + 128, (40, 36, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{index}.png")
    return folder


def weights(run: RunResult) -> dict[str, torch.Tensor]:
    return run.model.state_dict()


def same_weights(one: RunResult, other: RunResult) -> bool:
    return all(torch.equal(value, weights(other)[key]) for key, value in weights(one).items())
