"""The training loop. The task is handed in; everything random is a function of the seed and the update."""

import contextlib
import itertools
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from mixlab.core.errors import MixlabError, TrainingError
from mixlab.core.processes import Processes
from mixlab.data.loader import Batch, Loader
from mixlab.data.seeding import seed_of
from mixlab.models.dense_model import Trainable
from mixlab.training.checkpoint import load_state, save_state
from mixlab.training.optimizer import LearningRate, build_optimizer, clip, total_updates
from mixlab.training.recipe import Recipe
from mixlab.training.sharding import Wrapped, gather, restore, whole, wrap

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}
Metrics = dict[str, float]


class Task(Protocol):
    """What is learned: batches, a loss on them, and how good a model is."""

    train: Loader
    metric: str  # of `evaluate`; larger is better
    shown: tuple[str, ...]  # of `evaluate`, after every epoch

    def loss(self, model: nn.Module, batch: Batch, seed: int) -> Tensor:
        """The mean over a batch; `seed` is for what the task draws itself."""
        ...

    def evaluate(self, model: nn.Module) -> Metrics:
        """On images that are not trained on; empty if there are none."""
        ...


class Callback:
    """Something that watches a run. Override what you need; `run` is the `Trainer`."""

    def start(self, run: "Trainer") -> None: ...

    def update(self, run: "Trainer", loss: float, lr: float) -> None: ...

    def epoch(self, run: "Trainer", metrics: Metrics) -> None: ...

    def end(self, run: "Trainer") -> None: ...


class Trainer:
    """One run of a recipe. `fit` goes on from wherever `resume` left it."""

    def __init__(
        self,
        model: Trainable,
        task: Task,
        recipe: Recipe,
        *,
        folder: Path,
        accumulate: int = 1,
        seed: int = 0,
        processes: Processes | None = None,
        sharding: str = "ddp",
        callbacks: Sequence[Callback] = (),
        save_seconds: float = 300.0,
        save_updates: int = 0,
        selects: bool = True,
    ) -> None:
        self.processes = processes or Processes()
        self.model, self.task, self.recipe, self.folder = model.to(self.processes.device), task, recipe, folder
        self.accumulate, self.seed, self.callbacks = accumulate, seed, tuple(callbacks)
        self.save_seconds, self.save_updates = save_seconds, save_updates
        self.updates_per_epoch = len(task.train) // accumulate
        if not self.updates_per_epoch:
            raise TrainingError(
                f"An update takes {accumulate} batches, but an epoch has only {len(task.train)}: use a smaller "
                f"batch_size (--set batch_size=N) or more data."
            )
        self.total = total_updates(recipe.schedule, self.updates_per_epoch)
        self.wrapped: Wrapped = wrap(self.model, self.processes, sharding)
        if self.wrapped.kind == "fsdp" and recipe.ema_decay is not None:
            raise TrainingError("An average of weights (ema_decay) needs copies of the model: use sharding = ddp.")
        self.optimizer = build_optimizer(self.model, recipe)
        self.schedule = LearningRate(self.optimizer, recipe, self.updates_per_epoch)
        self.ema = None if recipe.ema_decay is None else ModelEmaV3(self.model, decay=recipe.ema_decay)
        self.scaler = torch.amp.GradScaler(self.processes.device.type, enabled=recipe.precision == "float16")
        self.update = 0
        self.loss_sum, self.summed, self.seconds = 0.0, 0, 0.0
        self.best: Metrics | None = None
        self.selects = selects  # whether the best epoch may be chosen by what is evaluated
        self.improved = False  # with the last epoch
        self.history: list[Metrics] = []
        self.asked_to_stop = False  # this process, by a signal
        self.stopping = False  # all processes, which agree on the update
        self.saved = time.monotonic()

    # -- the run ---------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the end, or until Ctrl-C or SIGTERM: then the state is saved and `stopping` is true."""
        self.notify("start")
        try:
            with self.stopping_politely():
                while self.update < self.total and not self.stopping:
                    self.run_epoch()
            if self.stopping:
                self.save()
        finally:
            self.notify("end")

    def run_epoch(self) -> None:
        """The rest of the epoch that the next update is in, then its evaluation."""
        epoch, done = divmod(self.update, self.updates_per_epoch)
        last = min(self.updates_per_epoch, self.total - epoch * self.updates_per_epoch)
        ends = epoch * self.updates_per_epoch + last == self.total
        evaluates = ends or (epoch + 1) % self.recipe.evaluate_every == 0
        batches = self.task.train.epoch(epoch, start=done * self.accumulate)
        self.wrapped.train()
        start = time.monotonic()
        for number in range(done, last):
            loss, lr = self.step(list(itertools.islice(batches, self.accumulate)))
            self.loss_sum, self.summed = self.loss_sum + loss, self.summed + 1
            self.update += 1
            self.notify("update", loss, lr)
            self.stopping = self.stopping or (self.asked_to_stop and self.processes.world == 1)
            if evaluates and number == last - 1:  # an epoch is saved with its evaluation, or it would be lost
                break
            if self.stopping or self.save_is_due():
                self.seconds, start = self.seconds + time.monotonic() - start, time.monotonic()
                if self.stopping:
                    return
                self.save()
        self.seconds += time.monotonic() - start
        if evaluates:
            self.finish_epoch(epoch)

    def finish_epoch(self, epoch: int) -> None:
        """Evaluate, tell and save. Loss and seconds are of all updates since it was done before."""
        metrics: Metrics = {"epoch": epoch + 1, "train_loss": self.loss_sum / self.summed, "lr": self.rate}
        metrics |= self.evaluate()
        metrics["train_seconds"] = round(self.seconds, 3)
        score = metrics.get(self.task.metric) if self.selects else None
        better = score is not None and (self.best is None or score > self.best[self.task.metric])
        self.best = metrics if better else self.best
        self.history.append(metrics)
        self.loss_sum, self.summed, self.seconds = 0.0, 0, 0.0
        self.improved = better
        self.notify("epoch", metrics)
        self.save()

    def evaluate(self) -> Metrics:
        """Of the averaged weights where the recipe keeps an average."""
        model = self.evaluated
        model.eval()
        with self.wrapped.with_whole_weights(), torch.inference_mode(), self.autocast():
            metrics = self.task.evaluate(model)
        self.model.train()
        return metrics

    @property
    def evaluated(self) -> nn.Module:
        return self.model if self.ema is None else self.ema.module

    def whole_model(self) -> nn.Module:
        """What is evaluated, with all weights in one place; every process must ask."""
        return whole(self.wrapped, self.model, self.optimizer) if self.wrapped.kind == "fsdp" else self.evaluated

    @property
    def rate(self) -> float:
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    # -- one update ------------------------------------------------------------------------------

    def step(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """The loss over all batches and processes, and the learning rate of the head."""
        lr = self.schedule.set(self.update)
        share = self.recipe.batch_size / self.processes.world  # what DDP averages over its processes
        total = torch.zeros((), device=self.processes.device)
        for index, batch in enumerate(batches):
            batch = to_device(batch, self.processes.device)
            seed = seed_of(self.seed, self.update, index, self.processes.rank)
            seed_device(seed, self.processes.device)
            with self.wrapped.accumulating(last=index == len(batches) - 1):
                with self.autocast():
                    loss = self.task.loss(self.wrapped.module, batch, seed)
                scaled = loss * (len(batch.labels) / share)
                self.scaler.scale(scaled).backward()
            total += scaled.detach()
        self.scaler.unscale_(self.optimizer)
        norm = clip(self.model, self.recipe.optimizer.clip_norm)
        asked = torch.full_like(total, float(self.asked_to_stop))
        value, stop = self.processes.sum(torch.stack([total, asked])).tolist()
        value, self.stopping = value / self.processes.world, stop > 0
        if not math.isfinite(value) or not (self.scaler.is_enabled() or torch.isfinite(norm)):
            raise TrainingError(self.diagnosis(batches, value, lr))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.model)
        return value, lr

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        device, dtype = self.processes.device.type, DTYPES[self.recipe.precision]
        if dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(device, dtype)

    def diagnosis(self, batches: Sequence[Batch], value: float, lr: float) -> str:
        """Where the first number that is none came from."""
        where = first_bad_output(self, batches)
        kept = (
            f"`mixlab train --resume {self.folder}`"
            if (self.folder / "last.ckpt").exists()
            else "nothing was saved yet"
        )
        return (
            f"The loss or a gradient is {value if not math.isfinite(value) else 'not finite'} at update {self.update} "
            f"with learning rate {lr:.3g}; first in {where}. Training stopped; the last good checkpoint is kept "
            f"({kept}). Lower the learning rate, warm up longer, clip gradients (--set optimizer.clip_norm=1.0), or "
            f"use float32."
        )

    # -- saving and going on ---------------------------------------------------------------------

    def save_is_due(self) -> bool:
        if self.save_updates:
            return self.update % self.save_updates == 0
        if self.update % 16:
            return False
        due = torch.tensor(float(time.monotonic() - self.saved >= self.save_seconds), device=self.processes.device)
        return bool(self.processes.sum(due))

    def save(self) -> None:
        """The whole state, from the first process."""
        model, optimizer = gather(self.wrapped, self.model, self.optimizer)
        state = {
            "model": model,
            "optimizer": optimizer,
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "scaler": self.scaler.state_dict(),
            "update": self.update,
            "loss_sum": self.loss_sum,
            "summed": self.summed,
            "seconds": self.seconds,
            "best": self.best,
            "history": self.history,
        }
        if self.processes.first:
            save_state(self.folder, state)
        self.processes.wait()
        self.saved = time.monotonic()

    def resume(self) -> str:
        """Take over the newest complete state; the name of its file."""
        state, name = load_state(self.folder)
        key = "optimizer" if "optimizer" in state else "optimiser"  # as 0.1.0 spelled it
        restore(self.wrapped, self.model, self.optimizer, state["model"], state[key])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        self.scaler.load_state_dict(state["scaler"])
        self.update, self.seconds = state["update"], state["seconds"]
        self.loss_sum, self.summed = state["loss_sum"], state["summed"]
        self.best, self.history = state["best"], state["history"]
        return name

    # -- watching --------------------------------------------------------------------------------

    def notify(self, event: str, *details: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *details)

    @contextlib.contextmanager
    def stopping_politely(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM lets the update finish and the state be saved; the second ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in signals}

        def stop(number: int, frame: object) -> None:
            self.asked_to_stop = True
            for one in signals:
                signal.signal(one, before[one])

        for number in signals:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number in signals:
                signal.signal(number, before[number])


def seed_device(seed: int, device: torch.device) -> None:
    """The generators that a step draws from; `torch.manual_seed` looks for every device there might be."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def to_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(moved(part, device) for part in batch)) if device.type != "cpu" else batch


def moved(part: Any, device: torch.device) -> Any:
    """A tensor, a list or a dict of them, on a device."""
    if isinstance(part, Tensor):
        return part.to(device, non_blocking=True)
    if isinstance(part, dict):
        return {name: moved(one, device) for name, one in part.items()}
    return [moved(one, device) for one in part]


@torch.no_grad()
def first_bad_output(run: Trainer, batches: Sequence[Batch]) -> str:
    """The first module of a forward pass whose output is not finite, else the parameters with such gradients."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, (tuple, list)) else [output]
            bad = any(isinstance(one, Tensor) and not one.isfinite().all() for one in tensors)
            if bad and not any(module.children()):
                found.append(f"the output of {name} ({type(module).__name__})")

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in run.model.named_modules() if name]
    for index, batch in enumerate(batches):
        seed = seed_of(run.seed, run.update, index, run.processes.rank)
        seed_device(seed, run.processes.device)
        with run.autocast(), contextlib.suppress(MixlabError, RuntimeError):  # only what was seen on the way counts
            run.task.loss(run.model, to_device(batch, run.processes.device), seed)
    for handle in handles:
        handle.remove()
    if not found:
        bad = [n for n, p in run.model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        found = [f"the gradient of {name}" for name in bad[-1:]]
    return found[0] if found else "the loss itself"
