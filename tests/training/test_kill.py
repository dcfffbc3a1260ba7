"""Runs in processes of their own: killed at any moment, and two at once."""

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from mixlab.cli import main
from tests.training.tiny import dark_and_bright

KILLS = 5
COMMON = ["--recipe", "digits", "--no-tensorboard", "--workers", "0", "--device", "cpu"]
COMMON += ["--model-set", "dims=[8,16,16,16]", "depths=[1,1,1,1]"]
CHANGES = ["--set", "schedule.warmup_epochs=1"]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mixlab"]


# Imports once what takes seconds, and becomes a process of its own for every line: its number, and how it ended
FORKS = """
import json, os, sys
import mixlab.training.run
from mixlab.cli import main
for line in sys.stdin:
    if not (process := os.fork()):
        os.dup2(2, 1)
        os._exit(main(json.loads(line)))
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def mixlab(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mixlab", *arguments]
    return subprocess.Popen(
        command, env=environment(), text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


class Forks:
    """`mixlab` with other arguments again and again, one process after the other."""

    def __init__(self, errors: Path) -> None:
        command = [sys.executable, "-c", FORKS]
        with errors.open("w") as opened:
            self.server = subprocess.Popen(
                command, env=environment(), bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=opened
            )

    def answer(self) -> int:
        assert self.server.stdout is not None
        return int(self.server.stdout.readline())

    def start(self, *arguments: str) -> int:
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(arguments).encode() + b"\n")
        return self.answer()

    @property
    def is_running(self) -> bool:
        assert self.server.stdout is not None
        return not select.select([self.server.stdout], [], [], 0)[0]

    def close(self) -> None:
        self.server.communicate()


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "final.safetensors")


def checkpointed(folder: Path) -> float:
    """When the last checkpoint was written; 0 before the first."""
    path = folder / "last.ckpt"
    return path.stat().st_mtime if path.exists() else 0.0


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    arguments = ["train", "caformer_pico", "digits", *COMMON, *CHANGES, "batch_size=64", "ema_decay=0.9"]
    arguments += ["--epochs", "6", "--save-updates", "3"]
    straight = mixlab(*arguments, "--out", str(whole))
    chance, killed = random.Random(0), 0
    forks = Forks(tmp_path / "errors")
    process = forks.start(*arguments, "--out", str(cut))
    while killed < KILLS and forks.is_running:
        before = checkpointed(cut)
        while forks.is_running and checkpointed(cut) == before:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.15)
        if forks.is_running:
            os.kill(process, signal.SIGKILL)
            assert forks.answer() == -signal.SIGKILL
            killed += 1
            process = forks.start("train", "--resume", str(cut))
    assert forks.answer() == 0, (tmp_path / "errors").read_text()
    forks.close()
    finish(straight)
    assert killed == KILLS, "the run was over before it could be killed often enough"
    ours, expected = weights(cut), weights(whole)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[key], expected[key]) for key in expected)
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (cut, whole)]
    assert [row["train_loss"] for row in metrics[0]] == [row["train_loss"] for row in metrics[1]]


def arguments(folder: Path, epochs: int) -> list[str]:
    """Training on 32 pictures in steps of 8; 31 to evaluate, which two processes cannot share evenly."""
    data = dark_and_bright(folder / "data", each=16)
    (data / "val" / "dark" / "0.png").unlink()
    shutil.copytree(data / "val", data / "test")
    return ["train", "caformer_pico", str(data), *COMMON, *CHANGES, "batch_size=8", "--epochs", str(epochs)]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_processes_train_as_one_and_evaluate_every_image_once(tmp_path: Path, sharding: str) -> None:
    one, two, words = tmp_path / "one", tmp_path / "two", arguments(tmp_path, epochs=2)
    assert main([*words, "--out", str(one)]) == 0
    command = [*LAUNCH, *words, "--sharding", sharding, "--out", str(two)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert weights(one).keys() == weights(two).keys()
    assert (two / "best.safetensors").exists()
    tested = [json.loads((folder / "result.json").read_text())["test"] for folder in (two, one)]
    assert tested[0]["images"] == tested[1]["images"] == 31
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (two, one)]
    for ours, expected in zip(*metrics, strict=True):
        assert ours["images"] == expected["images"] == 31
        assert ours["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-3)
        assert ours["val_loss"] == pytest.approx(expected["val_loss"], rel=5e-3)


def test_two_processes_stop_together_and_go_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [*LAUNCH, *arguments(tmp_path, epochs=300), "--save-updates", "3", "--out", str(out)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (out / "last.ckpt").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    before = checkpointed(out)
    assert before, "the run did not start"
    process.send_signal(signal.SIGTERM)  # torchrun passes it on, to one process after the other
    process.wait(timeout=60)
    assert checkpointed(out) > 0
    assert not (out / "result.json").exists()
    done = torch.load(out / "last.ckpt", weights_only=True)["update"]
    assert 0 < done < 300 * 4
