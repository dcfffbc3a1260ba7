"""What a run shows and writes while it goes on: a progress bar, metrics as CSV and JSON, TensorBoard, weights."""

import csv
import io
import json
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mixlab.core.files import write_whole
from mixlab.models.weights import save_weights
from mixlab.training.loop import Callback, Metrics, Trainer


class ProgressBar(Callback):
    """A bar with throughput, loss and time left for people; a line per epoch into files and pipes."""

    def __init__(self, title: str, *, bar: bool = True) -> None:
        self.title, self.images, self.since, self.has_bar = title, 0, time.monotonic(), bar and sys.stderr.isatty()
        self.console = Console(stderr=True)
        self.bar: Progress | None = None

    def start(self, run: Trainer) -> None:
        if not run.processes.first or not self.has_bar:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        status = TextColumn("{task.fields[status]}")
        self.bar = Progress(*columns, status, TimeRemainingColumn(), console=self.console, transient=True)
        self.bar.start()
        self.task = self.bar.add_task(self.title, total=run.total, completed=run.update, status="")

    def update(self, run: Trainer, loss: float, lr: float) -> None:
        self.images += run.recipe.batch_size
        if self.bar is not None:
            speed = self.images / max(time.monotonic() - self.since, 1e-9)
            self.bar.update(self.task, completed=run.update, status=f"loss {loss:.3f}  {speed:.0f} images/s")

    def epoch(self, run: Trainer, metrics: Metrics) -> None:
        if run.processes.first:
            names = [name for name in ("train_loss", "val_loss", *run.task.shown) if name in metrics]
            told = "  ".join(f"{name} {metrics[name]:.4g}" for name in names)
            epochs = -(-run.total // run.updates_per_epoch)
            line = f"{self.title}  epoch {metrics['epoch']:.0f}/{epochs}  {told}  {metrics['train_seconds']:.1f} s"
            self.console.print(line, highlight=False, soft_wrap=True)
        self.images, self.since = 0, time.monotonic()

    def end(self, run: Trainer) -> None:
        if self.bar is not None:
            self.bar.stop()


class Files(Callback):
    """`metrics.csv` and `metrics.json` after every epoch, always whole, and if wanted the best weights."""

    def __init__(self, *, best: bool = True) -> None:
        self.keeps_best = best

    def epoch(self, run: Trainer, metrics: Metrics) -> None:
        weights = run.whole_model() if run.improved and self.keeps_best else None
        if not run.processes.first:
            return
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, fieldnames=list(run.history[0]))
        writer.writeheader()
        writer.writerows(run.history)
        write_whole(run.folder / "metrics.csv", buffer.getvalue())
        write_whole(run.folder / "metrics.json", json.dumps(run.history, indent=1))
        if weights is not None:
            save_weights(weights, run.folder / "best.safetensors")


class TensorBoard(Callback):
    """The same numbers for TensorBoard. A run that goes on replaces what came after its checkpoint."""

    def start(self, run: Trainer) -> None:
        self.writer: Any = None
        if run.processes.first:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.update)

    def update(self, run: Trainer, loss: float, lr: float) -> None:
        if self.writer is not None and run.update % 10 == 0:
            self.writer.add_scalar("train/loss", loss, run.update)
            self.writer.add_scalar("train/lr", lr, run.update)

    def epoch(self, run: Trainer, metrics: Metrics) -> None:
        if self.writer is not None:
            for name, value in metrics.items():
                self.writer.add_scalar(f"epoch/{name}", value, run.update)

    def end(self, run: Trainer) -> None:
        if self.writer is not None:
            self.writer.close()
