import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from mixlab.core.errors import TrainingError
from mixlab.workflows.side_by_side import run_side_by_side


def note(file: Path) -> bool:
    file.touch()
    return True


def refuse() -> bool:
    raise TrainingError("not today")


def break_down() -> bool:
    raise ValueError("unforeseen")


def vanish() -> bool:
    os._exit(7)


def meet(own: Path, other: Path) -> bool:
    """True only if the other one does not come while this one waits."""
    own.write_text(str(torch.get_num_threads()))
    deadline = time.monotonic() + 60
    while not other.exists():
        if time.monotonic() > deadline:
            return True
        time.sleep(0.01)
    return False


def test_whatever_happens_to_one_the_others_finish_at_the_same_time(tmp_path: Path) -> None:
    works: dict[str, Callable[[], bool]] = {
        "refused": refuse,
        "broken": break_down,
        "gone": vanish,
        "first": partial(meet, tmp_path / "first", tmp_path / "second"),
        "second": partial(meet, tmp_path / "second", tmp_path / "first"),
    }
    failed, stopped = run_side_by_side(works, jobs=2)
    assert not stopped
    assert failed == {
        "refused": "not today",
        "broken": "ValueError: unforeseen",
        "gone": "its process ended with code 7",
    }
    threads = str(max(1, torch.get_num_threads() // 2))
    assert (tmp_path / "first").read_text() == (tmp_path / "second").read_text() == threads


def test_nothing_is_begun_after_one_was_stopped(tmp_path: Path) -> None:
    works = {name: partial(note, tmp_path / name) for name in ("a", "b")}
    assert run_side_by_side(works, jobs=1) == ({}, True)
    assert (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()
