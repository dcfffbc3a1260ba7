"""What training costs beside the arithmetic: the loop around a step, and loading JPEGs.

python benchmarks/training.py            # both, about two minutes on 2 quiet cores
python benchmarks/training.py overhead   # or one of: overhead, loading
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mixlab.core.processes import Processes
from mixlab.data import Loader, open_data, train_transform
from mixlab.models.zoo import model_config
from mixlab.training.loop import Callback, Trainer
from mixlab.training.recipe import load_recipe
from mixlab.training.run import Preparation, RunConfig


class Watch(Callback):
    """Seconds from update to update, and how many of them were spent in what is wrapped by `timed`."""

    def __init__(self) -> None:
        self.updates: list[tuple[float, float]] = []
        self.last, self.inside = 0.0, 0.0

    def start(self, run: Trainer) -> None:
        self.last, self.inside = time.perf_counter(), 0.0

    def update(self, run: Trainer, loss: float, lr: float) -> None:
        now = time.perf_counter()
        self.updates.append((now - self.last, self.inside))
        self.last, self.inside = time.perf_counter(), 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.inside += time.perf_counter() - start

        return call

    def each(self, batches: Iterator[Any]) -> Iterator[Any]:
        following = self.timed(lambda: next(batches, None))
        while (batch := following()) is not None:
            yield batch


class Watched:
    """A loader whose time is known."""

    def __init__(self, loader: Loader, watch: Watch) -> None:
        self.loader, self.watch = loader, watch

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return self.watch.each(self.loader.epoch(epoch, start))


def overhead() -> None:
    """What an update takes beside forward, backward and loading, in the same updates."""
    for name in ("caformer_pico", "vil_pico"):
        recipe = load_recipe("from_scratch_small", changes={"schedule.epochs": 6})
        watch, backward = Watch(), torch.Tensor.backward
        with tempfile.TemporaryDirectory() as folder:
            config = RunConfig(
                model=name, data="digits", recipe=recipe.plain(), workers=0, tensorboard=False, device="cpu"
            )
            parts = Preparation(config, Path(folder), Processes())
            task = parts.task()
            task.loss = watch.timed(task.loss)  # type: ignore[method-assign]
            task.train = Watched(task.train, watch)  # type: ignore[assignment]
            torch.Tensor.backward = watch.timed(backward)  # type: ignore[method-assign]
            Trainer(
                parts.model,
                task,
                recipe,
                folder=Path(folder),
                accumulate=parts.per_process // parts.micro,
                callbacks=[watch],
            ).fit()
            torch.Tensor.backward = backward  # type: ignore[method-assign]
        whole, inside = (float(np.median(column)) for column in zip(*watch.updates, strict=True))
        rest = float(np.median([all_ - own for all_, own in watch.updates]))
        print(
            f"{name}, batch {recipe.batch_size}: an update {1e3 * whole:.1f} ms, forward, backward and loading "
            f"{1e3 * inside:.1f} ms, the rest {1e3 * rest:.2f} ms ({rest / whole:.1%})"
        )


def loading() -> None:
    """Images per second from a folder of JPEGs with the augmentation of the papers."""
    rng, preprocessing = np.random.default_rng(0), model_config("caformer_s18").preprocessing
    with tempfile.TemporaryDirectory() as folder:
        for split, count in (("train", 400), ("val", 4)):
            for index in range(count):
                place = Path(folder) / split / f"class{index % 2}"
                place.mkdir(parents=True, exist_ok=True)
                coarse = Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8))
                coarse.resize((256, 224), Image.Resampling.BICUBIC).save(place / f"{index}.jpg", quality=90)
        data = open_data(folder, "train")
        for name in ("convformer_imagenet", "finetune"):
            words = load_recipe(name).augmentation
            loader = Loader(
                data, train_transform(words, (224, 224), preprocessing, 3), batch_size=32, train=True, seed=0, workers=2
            )
            best = 0.0
            for epoch in range(3):
                start = time.perf_counter()
                images = sum(len(batch.labels) for batch in loader.epoch(epoch))
                best = max(best, images / (time.perf_counter() - start))
            print(f"augmentation of {name}: {best:.0f} images/s with 2 workers")


PARTS = {"overhead": overhead, "loading": loading}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], help="what to measure; everything if nothing is named"
    )
    torch.set_num_threads(2)
    for part in parser.parse_args().parts or PARTS:
        PARTS[part]()


if __name__ == "__main__":
    main()
