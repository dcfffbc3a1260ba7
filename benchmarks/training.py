"""What training costs beside the arithmetic: the loop around a step, and loading JPEGs.

python benchmarks/training.py            # both, about two minutes on 2 quiet cores
python benchmarks/training.py overhead   # or one of: overhead, loading
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mixlab.data import Loader, open_data, train_transform
from mixlab.training.loop import Callback, Trainer
from mixlab.training.processes import Processes
from mixlab.training.recipe import load_recipe
from mixlab.training.run import Preparation, RunConfig
from mixlab.zoo import model_config


class Watch(Callback):
    """Seconds from update to update."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.last = 0.0

    def start(self, run: Trainer) -> None:
        self.last = time.perf_counter()

    def update(self, run: Trainer, loss: float, lr: float) -> None:
        now = time.perf_counter()
        self.times.append(now - self.last)
        self.last = now


def overhead() -> None:
    """An update of the loop beside forward, backward and loading of the same batches."""
    for name in ("caformer_pico", "vil_pico"):
        recipe = load_recipe("digits", changes={"schedule.epochs": 2})
        with tempfile.TemporaryDirectory() as folder:
            config = RunConfig(
                model=name, data="digits", recipe=recipe.plain(), workers=0, tensorboard=False, device="cpu"
            )
            parts = Preparation(config, Path(folder), Processes())
            watch, task = Watch(), parts.task()
            trainer = Trainer(
                parts.model,
                task,
                recipe,
                folder=Path(folder),
                accumulate=parts.per_process // parts.micro,
                callbacks=[watch],
            )
            trainer.fit()
        model, bare = parts.model.train(), []
        for batch in task.train.epoch(5):
            start = time.perf_counter()
            task.loss(model, batch, 0).backward()
            bare.append(time.perf_counter() - start)
            model.zero_grad()
        start = time.perf_counter()
        count = sum(1 for _ in task.train.epoch(6))
        loading = (time.perf_counter() - start) / count
        whole, arithmetic = float(np.median(watch.times)), float(np.median(bare))
        rest = whole - arithmetic - loading
        print(
            f"{name}, batch {recipe.batch_size}: an update {1e3 * whole:.1f} ms, forward and backward "
            f"{1e3 * arithmetic:.1f} ms, loading {1e3 * loading:.1f} ms, the rest {1e3 * rest:.1f} ms "
            f"({rest / whole:.1%})"
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
