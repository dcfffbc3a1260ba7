import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from mixlab.core.errors import TrainingError
from mixlab.training.checkpoint import LAST, PREVIOUS, load_state, save_state


def test_the_newest_state_comes_back_and_the_one_before_stays(tmp_path: Path) -> None:
    for update in range(3):
        save_state(tmp_path, {"update": update, "weights": torch.full((3,), float(update))})
    assert sorted(path.name for path in tmp_path.iterdir()) == [LAST, PREVIOUS]
    state, name = load_state(tmp_path)
    assert (state["update"], name) == (2, LAST)
    (tmp_path / LAST).unlink()
    assert load_state(tmp_path)[0]["update"] == 1


@pytest.mark.parametrize("kept", [0, 1, 100])
def test_a_truncated_file_is_passed_over(tmp_path: Path, kept: int) -> None:
    for update in range(2):
        save_state(tmp_path, {"update": update, "weights": torch.randn(1000)})
    whole = (tmp_path / LAST).read_bytes()
    (tmp_path / LAST).write_bytes(whole[: len(whole) * kept // 200])
    state, name = load_state(tmp_path)
    assert (state["update"], name) == (0, PREVIOUS)


def test_a_full_disk_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path, {"update": 7})

    def fail(state: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(TrainingError, match=r"No space left.*--resume"):
        save_state(tmp_path, {"update": 8})
    monkeypatch.undo()
    assert load_state(tmp_path)[0]["update"] == 7
    assert [path.name for path in tmp_path.iterdir()] == [LAST]


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="holds no checkpoint"):
        load_state(tmp_path)
    (tmp_path / LAST).write_bytes(b"no checkpoint")
    with pytest.raises(TrainingError, match=r"No checkpoint in .* can be read"):
        load_state(tmp_path)


def test_a_file_cannot_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "touched",))

    torch.save({"update": Evil()}, tmp_path / LAST)
    with pytest.raises(TrainingError, match="can be read"):
        load_state(tmp_path)
    assert not (tmp_path / "touched").exists()
