"""The state of a run on disk: complete or absent, never half; the one before it stays until the next is there."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from mixlab.core.errors import TrainingError

LAST, PREVIOUS = STATES = ("last.ckpt", "previous.ckpt")


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write `last.ckpt`; what was there becomes `previous.ckpt`. A failure leaves both as they were."""
    temporary = folder / f".{LAST}.{os.getpid()}"
    for left in folder.glob(f".{LAST}.*"):  # by a process that was killed while it wrote
        left.unlink(missing_ok=True)
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if (folder / LAST).exists():
            os.replace(folder / LAST, folder / PREVIOUS)
        os.replace(temporary, folder / LAST)
    except (OSError, RuntimeError) as error:
        told = str(error).splitlines()[0]
        raise TrainingError(
            f"The checkpoint in {folder} could not be written: {told}. The last good one is still there; make room and "
            f"go on with `mixlab train --resume {folder}`."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def has_state(folder: Path) -> bool:
    """Whether a run got far enough to save anything."""
    return any((folder / name).exists() for name in (LAST, PREVIOUS))


def load_state(folder: Path) -> tuple[dict[str, Any], str]:
    """The newest complete state and its file's name; broken files are passed over."""
    broken = []
    for name in (LAST, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            return dict(state), name
        except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
            broken.append(f"{name} ({str(error).splitlines()[0] if str(error) else type(error).__name__})")
    if broken:
        raise TrainingError(f"No checkpoint in {folder} can be read: {', '.join(broken)}.")
    raise TrainingError(f"{folder} holds no checkpoint ({LAST}): nothing to resume.")
