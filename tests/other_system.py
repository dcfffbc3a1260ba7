"""A process that takes itself for one on another system: `python -m tests.other_system win32|darwin FOLDER`.

PyTorch and the standard library are imported first, as they are; what Mixlab then looks for on that system is gone.
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

import numpy
import PIL.Image
import safetensors.torch
import sklearn.datasets  # type: ignore[import-untyped]
import torch

IMPORTED = (asyncio, subprocess, tempfile, numpy, PIL.Image, safetensors.torch, sklearn.datasets)
ABSENT_MODULES = {"win32": ("resource", "fcntl", "pwd", "grp", "termios"), "darwin": ()}
ABSENT_FUNCTIONS = {
    "win32": ("fork", "getloadavg", "getuid", "sched_getaffinity", "sched_setaffinity", "sysconf", "waitpid"),
    "darwin": ("sched_getaffinity", "sched_setaffinity"),
}
ABSENT_SIGNALS = {"win32": ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1"), "darwin": ()}


def become(system: str) -> None:
    """Take away what Python does not have there."""
    sys.platform = system
    for name in ABSENT_MODULES[system]:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in ABSENT_FUNCTIONS[system]:
        delattr(os, name)
    for name in ABSENT_SIGNALS[system]:
        delattr(signal, name)
    if system == "win32":
        load = ctypes.CDLL

        def load_by_name(name: str | None, *rest: Any, **options: Any) -> ctypes.CDLL:
            if name is None:
                raise TypeError("Windows has no library without a name")
            return load(name, *rest, **options)

        ctypes.CDLL = load_by_name  # type: ignore[assignment, misc]


def use(folder: str) -> None:
    """Build, train, evaluate, predict."""
    import mixlab
    from mixlab.cli import main
    from mixlab.core.guards import return_freed_memory
    from mixlab.deploy.serving.metrics import resident_bytes
    from mixlab.engine.kernels import kernels

    assert kernels() is None
    return_freed_memory()
    resident_bytes()
    model = mixlab.create_model("vil_pico").eval()
    with torch.inference_mode():
        assert model(torch.randn(2, 3, 40, 33)).isfinite().all()
    tiny = ["--model-set", "dims=[8,16,16,16]", "depths=[1,1,1,1]", "--epochs", "1", "--workers", "0"]
    recipe = ["--recipe", "digits", "--set", "schedule.warmup_epochs=0", "batch_size=512", "--no-tensorboard"]
    assert main(["train", "caformer_pico", "digits", *recipe, *tiny, "--out", f"{folder}/run"]) == 0
    assert main(["eval", f"{folder}/run/final.safetensors", "digits", "--workers", "0"]) == 0
    assert main(["doctor"]) == 1


if __name__ == "__main__":
    become(sys.argv[1])
    use(sys.argv[2])
