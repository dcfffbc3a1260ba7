from pathlib import Path
from typing import Any

import pytest
import torch

from mixlab.core.errors import PrecisionError
from mixlab.training.loop import Callback, Trainer
from mixlab.training.run import train
from tests.training.tiny import OPTIONS, dark_and_bright


def switches() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


class Look(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def update(self, run: Trainer, loss: float, lr: float) -> None:
        self.seen.append(switches())

    def epoch(self, run: Trainer, metrics: dict[str, float]) -> None:
        self.seen.append(switches())


def in_precision(precision: str, folder: Path, **more: Any) -> None:
    changes = {"precision": precision, "batch_size": 4, "schedule.epochs": 1, "schedule.warmup_epochs": 0}
    settings: dict[str, Any] = {"workers": 0, "tensorboard": False, "progress": False, "device": "cpu", **more}
    data = dark_and_bright(folder / "data")
    train("caformer_pico", data, out=folder / "run", recipe="digits", changes=changes, options=OPTIONS, **settings)


def test_tf32_holds_for_training_and_evaluation_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The switches change nothing on a CPU, so the check is lifted here; what they are set to can be seen."""
    monkeypatch.setattr("mixlab.training.run.check_tf32", lambda device: None)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    before, look = switches(), Look()
    in_precision("tf32", tmp_path, callbacks=[look])
    assert len(look.seen) == 3  # two updates and an evaluation
    assert set(look.seen) == {(True, True)}
    assert switches() == before


def test_training_in_tf32_on_a_cpu_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(PrecisionError, match="tf32 is arithmetic of NVIDIA GPUs"):
        in_precision("tf32", tmp_path)
    assert not (tmp_path / "run").exists()
