"""A whole run from names: model, data and recipe in; a folder with weights, metrics and all settings out."""

import contextlib
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

from mixlab.core.choices import make
from mixlab.core.errors import ConfigError, DataError, TrainingError, require
from mixlab.core.files import write_whole
from mixlab.core.guards import check_cpu_dtype, return_freed_memory
from mixlab.core.processes import Processes, processes
from mixlab.core.tf32 import check_tf32, tf32_set
from mixlab.core.version import VERSION
from mixlab.data.base import ImageData
from mixlab.data.loader import Loader, explain_dead_workers
from mixlab.data.open import Split, open_data, require_same_classes, splits
from mixlab.data.seeding import seed_of
from mixlab.data.subset import Joined
from mixlab.data.transforms import BatchMix, eval_transform, train_transform
from mixlab.dense.files import load_dense, task_of
from mixlab.engine.compile import compile_blocks
from mixlab.models.class_map import read_class_map
from mixlab.models.dense_model import DenseModel, Trainable
from mixlab.models.model import Model
from mixlab.models.weights import save_weights
from mixlab.models.zoo import create_model
from mixlab.training.checkpoint import STATES, has_state
from mixlab.training.fits import micro_batch
from mixlab.training.loop import DTYPES, Callback, Metrics, Task, Trainer
from mixlab.training.model_options import model_options, training_size
from mixlab.training.optimizer import freeze
from mixlab.training.recipe import check_train_splits, load_recipe, parse_recipe, respelled
from mixlab.training.tasks.classification import ClassificationTask, accuracy
from mixlab.training.watch import Files, ProgressBar, TensorBoard

CONFIG = "config.json"
BEST, FINAL, RESULT = "best.safetensors", "final.safetensors", "result.json"
Keep = Literal["all", "final", "results"]
DISCARDED: dict[Keep, tuple[str, ...]] = {"all": (), "final": (*STATES, BEST), "results": (*STATES, BEST, FINAL)}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a run is made of, resolved: enough to do it again."""

    model: str
    data: str
    recipe: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)  # overrides of the model
    weights: str | None = None  # to start from
    class_map: str | None = None  # a file that says which rows of the weights' classifier are the classes of the data
    seed: int = 0
    micro: int | None = None  # images per process at once; None: as many as fit
    workers: int = 2
    device: str = "auto"
    sharding: str = "ddp"
    compile: bool = False
    checkpointing: bool = False
    freeze_layers: int = 0
    train_splits: tuple[Split, ...] = ("train",)
    save_updates: int = 0  # 0: by time
    tensorboard: bool = True
    keep: Keep = "all"  # what stays of a finished run: every file, the final weights only, or no weights at all
    about: dict[str, Any] = field(default_factory=dict)  # versions and machine; not read again


@dataclass(frozen=True)
class RunResult:
    """What came out. `stopped`: Ctrl-C or a signal ended it early; `mixlab train --resume` goes on."""

    folder: Path
    history: tuple[Metrics, ...]
    best: Metrics | None
    test: Metrics | None
    stopped: bool
    evaluated_on: str | None  # the split of `history`; None: nothing was left to evaluate on
    train_images: int | None  # in an epoch; None: the run is from before this was written down
    model: Any = field(repr=False)  # a Model, a segmenter or a detector; None if its weights were not kept


def train(
    model: str,
    data: str | PathLike[str],
    *,
    out: str | PathLike[str],
    recipe: str | PathLike[str] = "from_scratch_small",
    changes: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    **settings: Any,
) -> RunResult:
    """Train a named model on a dataset (see `open_data`) by a recipe, into a new folder.

    `changes` override the recipe by dotted key, such as {"optimizer.lr": 1e-3}; `settings` are fields of `RunConfig`:
    seed, weights, options (of the model), micro, workers, device, compile, checkpointing, freeze_layers, ...
    """
    config = run_config(model, data, recipe=recipe, changes=changes, **settings)
    return run(config, Path(out), callbacks=callbacks, progress=progress)


def run_config(
    model: str,
    data: str | PathLike[str],
    *,
    recipe: str | PathLike[str],
    changes: Mapping[str, Any] | None = None,
    **settings: Any,
) -> RunConfig:
    resolved = load_recipe(recipe, model=model, changes=changes)
    settings = {"train_splits": resolved.train_splits, **settings}
    row = {"model": model, "data": os.fspath(data), "recipe": resolved.plain(), **settings}
    config: RunConfig = make(RunConfig, row, "the run")
    return config


def resume(folder: str | PathLike[str], *, callbacks: Sequence[Callback] = (), progress: bool = True) -> RunResult:
    """Go on with a run that was stopped or killed, from its newest complete checkpoint, else from the start."""
    path = Path(folder)
    config = read_config(path)
    return finished(path, config.keep) or run(config, path, callbacks=callbacks, progress=progress, resumed=True)


def continued(
    config: RunConfig, folder: Path, *, callbacks: Sequence[Callback] = (), progress: bool = True
) -> RunResult:
    """A run from the start, or from where an earlier call was cut off; `require_same_run` says whether it may be."""
    if (folder / CONFIG).exists():
        return resume(folder, callbacks=callbacks, progress=progress)
    return run(config, folder, callbacks=callbacks, progress=progress)


def require_same_run(config: RunConfig, folder: Path) -> None:
    """Raise if a folder holds another run than the one that is wanted there."""
    if not (folder / CONFIG).exists():
        return
    ours, theirs = (json.loads(json.dumps(asdict(one))) for one in (config, read_config(folder)))
    names = ("model", "data", "recipe", "options", "weights", "seed", "train_splits", "keep")
    other = [name for name in names if ours[name] != theirs[name]]
    if other:
        raise TrainingError(f"{folder} holds a run with another {' and '.join(other)}. Choose another --out.")


def finished(folder: Path, keep: Keep = "all") -> RunResult | None:
    """The result of a run that came to its end; None for a run that did not."""
    file, model = folder / FINAL, None
    if not (folder / RESULT).exists() or (keep != "results" and not file.exists()):
        return None
    discard(folder, keep)
    row = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    if keep != "results":
        model = create_model(weights=file) if task_of(file) == "classification" else load_dense(file)
    split, images = row.get("evaluated_on", "val"), row.get("train_images")
    return RunResult(folder, tuple(row["history"]), row["best"], row["test"], False, split, images, model)


def discard(folder: Path, keep: Keep) -> None:
    """Remove the files of a finished run that are not to be kept, and halves of them that a kill left behind."""
    for name in DISCARDED[keep]:
        for path in (folder / name, *folder.glob(f".{name}.*")):
            path.unlink(missing_ok=True)


def repeat(config: str | PathLike[str], out: str | PathLike[str], *, progress: bool = True) -> RunResult:
    """Do a run again from its config.json, or its folder, into another folder."""
    return run(read_config(Path(config)), Path(out), progress=progress)


def read_config(source: Path) -> RunConfig:
    """From a run's folder or the file itself."""
    path = source / CONFIG if source.is_dir() else source
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TrainingError(f"{source} is not a run folder: it has no {CONFIG}.") from error
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path} cannot be read: {error}") from error
    if isinstance(row, dict) and isinstance(row.get("recipe"), dict):
        row["recipe"] = respelled(row["recipe"])
    config: RunConfig = make(RunConfig, row, str(path))
    return config


def run(
    config: RunConfig,
    folder: Path,
    *,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    resumed: bool = False,
) -> RunResult:
    with processes(config.device) as own:
        if own.first and not resumed:  # the others may come when the first has begun to write
            check_new(folder)
        try:
            return preparation(config)(config, folder, own, resumed=resumed).execute(callbacks, progress=progress)
        finally:
            return_freed_memory()  # what a step took is of no use to what comes now


def preparation(config: RunConfig) -> "type[Preparation]":
    """By the task of the recipe."""
    task = config.recipe.get("task", "classification")
    if task == "classification":
        return Preparation
    from mixlab.training.dense import PREPARATIONS

    return PREPARATIONS[task]


def check_new(folder: Path) -> None:
    half_written = f".{CONFIG}."  # by a process that was killed before there was anything to go on with
    if folder.exists() and (
        not folder.is_dir() or any(not path.name.startswith(half_written) for path in folder.iterdir())
    ):
        raise TrainingError(
            f"The run folder {folder} exists and is not empty. Choose another with --out, or go on with "
            f"`mixlab train --resume {folder}`."
        )


class Preparation:
    """Everything that can be wrong is found here, before the first step. This one is for classification."""

    def __init__(self, config: RunConfig, folder: Path, own: Processes, *, resumed: bool = False) -> None:
        self.config, self.folder, self.processes, self.resumed = config, folder, own, resumed
        self.recipe = parse_recipe(config.recipe, "the run's recipe")
        check_train_splits(config.train_splits)
        classifies = self.recipe.task == "classification"
        require(config.class_map is None or classifies, f"no class map for {self.recipe.task}: it has no use for one.")
        check_precision(self.recipe.precision, own.device)
        self.train_data, self.val_data = self.open_splits()
        torch.manual_seed(seed_of(config.seed, 1))
        self.model = self.build_model()
        self.image_size = self.own_image_size()
        self.per_process = self.share()
        self.micro = self.images_at_once()

    # -- what a task decides ---------------------------------------------------------------------

    def splits(self) -> list[str]:
        return splits(self.config.data)

    def open(self, split: Any) -> Any:
        return open_data(self.config.data, split)

    def build(self, options: dict[str, Any]) -> Trainable:
        """The model that these options of `create_model` describe."""
        config, weights = self.config, self.config.weights
        if config.class_map is not None:
            require(weights is not None, "weights for a class map: it says which rows of their classifier to keep.")
            options["class_map"] = read_class_map(config.class_map, self.train_data.class_names, str(weights))
        return create_model(config.model, weights=weights, **options)

    def own_image_size(self) -> tuple[int, int]:
        assert isinstance(self.model, Model)
        return training_size(self.recipe, self.model.config)

    def task(self) -> Task:
        assert isinstance(self.model, Model)
        words, model = self.recipe.augmentation, self.model.config
        transform = train_transform(words, self.image_size, model.preprocessing, model.in_channels)
        mixes = words.mixup > 0 or words.cutmix > 0
        return ClassificationTask(
            train=self.loader(self.train_data, transform, training=True, batch=self.micro),
            val=None if self.val_data is None else self.evaluation_loader(self.val_data),
            mix=BatchMix(words, model.num_classes) if mixes else None,
            label_smoothing=words.label_smoothing,
            processes=self.processes,
        )

    def evaluate_on(self, data: Any, trainer: Trainer) -> Metrics:
        return accuracy(trainer.evaluated, self.evaluation_loader(data), self.processes)

    # -- the parts -------------------------------------------------------------------------------

    @property
    def evaluated_on(self) -> str | None:
        """The split that is evaluated in training: the first one that is not trained on."""
        unseen = [name for name in self.splits() if name not in ("train", *self.config.train_splits)]
        return next((name for name in ("val", "test") if name in unseen), None)

    def open_splits(self) -> tuple[Any, Any]:
        """What is trained on and what is evaluated; None where nothing is left for that."""
        parts = [self.open(name) for name in self.config.train_splits]
        val = None if self.evaluated_on is None else self.open(self.evaluated_on)
        for part in parts[1:] if val is None else parts:
            require_same_classes(part, parts[0] if val is None else val)
        if len(parts) == 1:
            return parts[0], val
        if not all(isinstance(part, ImageData) for part in parts):
            raise DataError("Only splits of single labelled images can be joined: give one that holds both.")
        return Joined(*parts), val

    def build_model(self) -> Trainable:
        config, fresh = self.config, not self.config.weights
        options = model_options(self.recipe, config.model, options=config.options, fresh=fresh)
        options = {"num_classes": len(self.train_data.class_names), **options}
        model = self.build(options)
        model.class_names = tuple(self.train_data.class_names)
        if self.config.checkpointing:
            (model.backbone if isinstance(model, DenseModel) else model).set_activation_checkpointing()
        freeze(model, self.recipe)
        require(self.config.freeze_layers >= 0, f"freeze_layers of 0 or more; got {self.config.freeze_layers}.")
        for _, names in model.layer_order[: self.config.freeze_layers]:
            for name in names:
                model.get_parameter(name).requires_grad_(False)
        return model

    def share(self) -> int:
        batch, world = self.recipe.batch_size, self.processes.world
        if batch % world:
            raise ConfigError(f"The batch_size {batch} cannot be shared equally by {world} processes.")
        if batch > len(self.train_data):
            raise DataError(
                f"The batch_size is {batch}, but {self.config.data} has only {len(self.train_data)} training images. "
                f"Use --set batch_size={max(1, len(self.train_data) // 4)} or less."
            )
        return batch // world

    def images_at_once(self) -> int:
        """The same on every process, or their steps would not meet."""
        micro = self.config.micro
        if micro is None:
            return self.processes.least(micro_batch(self.model, self.image_size, self.per_process, self.processes))
        if self.resumed:  # perhaps on another number of processes
            return math.gcd(micro, self.per_process)
        if self.per_process % micro:
            raise ConfigError(f"micro = {micro} does not divide the {self.per_process} images of a process.")
        return micro

    def loader(self, data: Any, transform: Any, *, training: bool, batch: int) -> Loader:
        return Loader(
            data,
            transform,
            batch_size=batch,
            train=training,
            seed=seed_of(self.config.seed, 2),
            repeats=self.recipe.augmentation.repeats if training else 1,
            workers=self.config.workers,
            rank=self.processes.rank,
            world=self.processes.world,
        )

    def evaluation_loader(self, data: Any) -> Loader:
        assert isinstance(self.model, Model)
        model = self.model.config
        transform = eval_transform(model.evaluation_size, model.preprocessing, model.in_channels)
        return self.loader(data, transform, training=False, batch=self.micro)

    # -- the run ---------------------------------------------------------------------------------

    def execute(self, callbacks: Sequence[Callback], *, progress: bool) -> RunResult:
        config = self.config
        self.write_config()
        if config.compile:
            compile_blocks(self.model.backbone if isinstance(self.model, DenseModel) else self.model)
        own: list[Callback] = [Files(best=config.keep == "all")]
        own += [TensorBoard()] if config.tensorboard else []
        own += [ProgressBar(f"{config.model} on {config.data}")] if progress else []
        trainer = Trainer(
            self.model,
            self.task(),
            self.recipe,
            folder=self.folder,
            accumulate=self.per_process // self.micro,
            seed=config.seed,
            processes=self.processes,
            sharding=config.sharding,
            callbacks=[*own, *callbacks],
            save_updates=config.save_updates,
            selects=self.evaluated_on == "val" or "val" not in self.splits(),
        )
        if self.resumed and has_state(self.folder):
            trainer.resume()
        products = tf32_set(True) if self.recipe.precision == "tf32" else contextlib.nullcontext()
        with products:
            with explain_dead_workers():
                trainer.fit()
            return self.finish(trainer)

    def write_config(self) -> None:
        if self.resumed or not self.processes.first:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainingError(f"The run folder {self.folder} cannot be made: {error.strerror}.") from error
        about: dict[str, Any] = {"mixlab": VERSION, "torch": torch.__version__, "python": platform.python_version()}
        about |= {"machine": platform.machine(), "threads": torch.get_num_threads(), "world": self.processes.world}
        row = asdict(self.config) | {"micro": self.micro, "about": about}
        write_whole(self.folder / CONFIG, json.dumps(row, indent=1))

    def finish(self, trainer: Trainer) -> RunResult:
        test = None
        if not trainer.stopping:
            test = self.test(trainer)
            whole = trainer.whole_model()
            if self.processes.first:
                if self.config.keep != "results":
                    save_weights(whole, self.folder / FINAL)
                result: dict[str, Any] = {"history": trainer.history, "best": trainer.best, "test": test}
                result |= {"evaluated_on": self.evaluated_on, "train_images": len(self.train_data)}
                write_whole(self.folder / RESULT, json.dumps(result, indent=1))
                discard(self.folder, self.config.keep)
        model = trainer.evaluated
        assert isinstance(model, (Model, DenseModel))
        history, split, images = tuple(trainer.history), self.evaluated_on, len(self.train_data)
        return RunResult(self.folder, history, trainer.best, test, trainer.stopping, split, images, model)

    def test(self, trainer: Trainer) -> Metrics | None:
        """The test split, if the data has one that training did not look at."""
        if "test" not in self.splits() or self.evaluated_on != "val":
            return None
        trainer.evaluated.eval()
        with trainer.wrapped.with_whole_weights(), torch.inference_mode(), trainer.autocast():
            return self.evaluate_on(self.open("test"), trainer)


def check_precision(precision: str, device: torch.device) -> None:
    """Before any other arithmetic: later, nothing can be done about a CPU that traps on it."""
    if precision == "tf32":
        check_tf32(device)
    elif device.type == "cpu":
        check_cpu_dtype(DTYPES[precision])
