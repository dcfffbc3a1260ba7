"""Runs in processes of their own: killed at any moment, and two at once."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

KILLS = 5
COMMON = ["digits", "--recipe", "digits", "--no-tensorboard", "--workers", "0", "--device", "cpu"]
MODEL = ["--model-set", "dims=[8,16,16,16]", "depths=[1,1,1,1]"]
LENGTH = ["--set", "batch_size=64", "schedule.warmup_epochs=1", "ema_decay=0.9"]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def mixlab(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mixlab", *arguments]
    return subprocess.Popen(
        command, env=environment(), text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


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
    arguments = ["train", "caformer_pico", *COMMON, *MODEL, *LENGTH, "--epochs", "8", "--save-updates", "3"]
    straight = mixlab(*arguments, "--out", str(whole))
    chance, killed = random.Random(0), 0
    process = mixlab(*arguments, "--out", str(cut))
    while killed < KILLS and process.poll() is None:
        before = checkpointed(cut)
        while process.poll() is None and checkpointed(cut) == before:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.15)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
            process = mixlab("train", "--resume", str(cut))
    finish(process)
    finish(straight)
    assert killed == KILLS, "the run was over before it could be killed often enough"
    ours, expected = weights(cut), weights(whole)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[key], expected[key]) for key in expected)
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (cut, whole)]
    assert [row["train_loss"] for row in metrics[0]] == [row["train_loss"] for row in metrics[1]]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_processes_train_as_one_and_evaluate_every_image_once(tmp_path: Path, sharding: str) -> None:
    arguments = ["train", "caformer_pico", *COMMON, *MODEL, *LENGTH[:3], "--epochs", "2"]
    finish(mixlab(*arguments, "--out", str(tmp_path / "one")))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mixlab"]
    command = [sys.executable, *launcher, *arguments, "--sharding", sharding, "--out", str(tmp_path / "two")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert weights(tmp_path / "one").keys() == weights(tmp_path / "two").keys()
    assert (tmp_path / "two" / "best.safetensors").exists()
    one, two = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("one", "two"))
    for ours, expected in zip(two, one, strict=True):
        assert ours["images"] == expected["images"] == 360
        assert ours["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-3)
        assert ours["val_loss"] == pytest.approx(expected["val_loss"], rel=5e-3)


def test_two_processes_stop_together_and_go_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["train", "caformer_pico", *COMMON, *MODEL, *LENGTH[:3], "--epochs", "30", "--save-updates", "3"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mixlab"]
    command = [sys.executable, *launcher, *arguments, "--out", str(out)]
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
    assert 0 < done < 30 * 16
