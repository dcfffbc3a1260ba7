"""Make the files of a release that later ones must still read. Run it with that release on the path:

    cd tests/release && PYTHONPATH=RELEASE python make.py files

`recipe.toml` and `commands.txt` are written by hand. Everything else comes from here.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import mixlab
from mixlab.cli import main
from mixlab.training.loop import Callback, Trainer
from mixlab.training.run import train

OPTIONS: dict[str, Any] = {"dims": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
STOPPED_AFTER = 3  # updates, of eight


class Stop(Callback):
    """Ctrl-C in the middle of a run."""

    def update(self, run: Trainer, loss: float, lr: float) -> None:
        if run.update == STOPPED_AFTER:
            os.kill(os.getpid(), signal.SIGINT)


def make(folder: Path) -> None:
    torch.set_num_threads(1)
    make_runs(folder)
    make_weights(folder)
    make_findings(folder)


def make_runs(folder: Path) -> None:
    """One run twice: stopped with a checkpoint, and to its end."""
    common: dict[str, Any] = {"recipe": folder / "recipe.toml", "options": OPTIONS, "workers": 0, "tensorboard": False}
    common |= {"progress": False, "device": "cpu"}
    for name, callbacks, keep in (("stopped", [Stop()], "all"), ("finished", [], "final")):
        shutil.rmtree(folder / name, ignore_errors=True)
        train("caformer_pico", "digits", out=folder / name, callbacks=callbacks, keep=keep, **common)
    (folder / "stopped" / "previous.ckpt").unlink(missing_ok=True)


def make_weights(folder: Path) -> None:
    """A file of weights, and the scores that they give."""
    torch.manual_seed(0)
    model = mixlab.create_model("vil_pico", dims=[32], depths=[2], num_classes=10).eval()
    model.class_names = tuple(f"class {number}" for number in range(10))
    mixlab.save_weights(model, folder / "vil.safetensors")
    image = torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)
    with torch.inference_mode():
        scores = model(image)
    (folder / "vil.json").write_text(json.dumps(scores.tolist()) + "\n")


def make_findings(folder: Path) -> None:
    weights = str(folder / "finished" / "final.safetensors")
    flags = ["--sizes", "32", "40", "--workers", "0", "--seconds", "0", "--device", "cpu"]
    assert main(["resolution", weights, "digits", *flags, "--no-memory", "--out", str(folder / "resolution")]) == 0
    for picture in [path for path in (folder / "resolution").iterdir() if path.suffix != ".json"]:
        picture.unlink()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
