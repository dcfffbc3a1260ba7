"""A folder in which the commands of docs/reproduce.md run as they stand: small data, tiny models, weights on demand."""

import copy
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io  # type: ignore[import-untyped]
import timm
from PIL import Image

import mixlab
import mixlab.models.zoo
from mixlab.cli import main
from mixlab.cli.arguments import pairs
from mixlab.dense.segmenter import create_segmenter
from mixlab.evals.quality.corruptions import standard
from mixlab.evals.quality.variants import imagenet_places
from mixlab.findings.findings import finding, write_finding
from mixlab.models.released import find_release
from tests.data.make import cifar10_pickles, cifar_images, picture, vtab, write
from tests.tools.page_commands import Command, weight_files, written_by

SIZE = (72, 64)  # of every image, px
DIMS, DEPTH = (8, 16, 32, 32), 6  # of models with four stages, and with one
# of timm's models; the others are small enough
TIMM_SIZES: Mapping[str, Mapping[str, Any]] = {
    "swin": {"depths": (1, 1, 1, 1), "embed_dim": 16, "num_heads": (1, 1, 2, 2)},
    "convnext": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
    "deit": {"depth": 2, "embed_dim": 32, "num_heads": 1},
}


# -- models --------------------------------------------------------------------------------------


def shrunken(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a model with little width and depth, for small images, and all that makes it what it is."""
    if "members" in row:
        return dict(row)
    stages = len(row["dims"])
    if stages == 1:
        dims, depths = [64 if row["class_tokens"] else 32] if "class_tokens" in row else [32], [DEPTH]
    else:
        dims, depths = list(DIMS), [1] * stages
    if "coscale" in row:
        dims = [16] * stages
        row = {**row, "coscale": {**row["coscale"], "blocks": 1}}
    return {**row, "dims": dims, "depths": depths, "image_size": 64}


def shrink_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every named model becomes tiny, and timm gives models without downloading their weights."""
    rows = {name: shrunken(row) for name, row in copy.deepcopy(mixlab.models.zoo.rows()).items()}
    monkeypatch.setattr("mixlab.models.zoo.rows", lambda: rows)
    create = timm.create_model

    def small(name: str, *arguments: Any, pretrained: bool = False, **options: Any) -> Any:
        sizes = next((sizes for family, sizes in TIMM_SIZES.items() if name.startswith(family)), {})
        return create(name, *arguments, **{**sizes, **options})

    monkeypatch.setattr(timm, "create_model", small)


# -- data ----------------------------------------------------------------------------------------


def make_data(root: Path) -> None:
    """The datasets of the page below one folder, each in its published layout."""
    names = list(imagenet_places())
    make_imagenet(root / "imagenet", names)
    for name in names[:2]:
        write(root / "imagenet21k" / name / "0.png", picture(0, SIZE))
        write(root / "imagenet21k" / name / "1.png", picture(1, SIZE))
    for folder, name in {"A": "n01498041", "R": "n01443537", "SKETCH": names[0], "V2": "0"}.items():
        write(root / folder / name / "0.png", picture(0, SIZE))
    for corruption in standard():
        write(root / "C" / corruption / "1" / names[0] / "0.png", picture(0, SIZE))
    write(root / "photo.jpg", picture(0, SIZE))
    make_dense(root / "PATH")
    make_small(root / "PATH")


def make_imagenet(root: Path, names: list[str]) -> None:
    """All 1000 classes, of which two have images, with the validation images' own names."""
    for name in names:
        for split in ("train", "val"):
            (root / split / name).mkdir(parents=True)
    for number, name in enumerate(names[:2]):
        for index in range(2):
            write(root / "train" / name / f"{index}.png", picture(2 * number + index, SIZE))
        write(root / "val" / name / f"ILSVRC2012_val_{number + 1:08d}.png", picture(number, SIZE))


def make_dense(root: Path) -> None:
    """ADE20K and COCO: two images to train on, one to evaluate on."""
    for split, count in {"training": 2, "validation": 1}.items():
        for index in range(count):
            write(root / "images" / split / f"{index}.jpg", picture(index, SIZE))
            mask = np.resize(np.arange(4, dtype=np.uint8), (SIZE[1], SIZE[0]))
            write(root / "annotations" / split / f"{index}.png", Image.fromarray(mask))
    box = {"bbox": [8, 8, 40, 30], "segmentation": [[8, 8, 48, 8, 48, 38, 8, 38]], "area": 1200, "iscrowd": 0}
    for split, count in {"train": 2, "val": 1}.items():
        images = [{"id": index, "file_name": f"{index}.jpg", "width": 72, "height": 64} for index in range(count)]
        for image in images:
            write(root / f"{split}2017" / f"{image['id']}.jpg", picture(int(str(image["id"])), SIZE))
        objects = [{"id": index, "image_id": index, "category_id": 1 + index % 2, **box} for index in range(count)]
        categories = [{"id": 1, "name": "ant"}, {"id": 2, "name": "zebra"}]
        text = json.dumps({"images": images, "annotations": objects, "categories": categories})
        (root / "annotations" / f"instances_{split}2017.json").write_text(text)


def make_small(root: Path) -> None:
    """CIFAR, Flowers-102, Stanford Cars and two tasks of VTAB-1K."""
    cifar10_pickles(root, count=2)
    for name in ("train", "test"):
        batch = {b"data": cifar_images(2), b"fine_labels": [0, 1]}
        (root / name).write_bytes(pickle.dumps(batch, protocol=2))
    scipy.io.savemat(root / "imagelabels.mat", {"labels": np.arange(1, 7, dtype=np.uint8)[None]})
    sets = {"trnid": np.array([[1, 2]]), "valid": np.array([[3, 4]]), "tstid": np.array([[5, 6]])}
    scipy.io.savemat(root / "setid.mat", sets)
    for number in range(1, 7):
        write(root / "jpg" / f"image_{number:05d}.jpg", picture(number, SIZE))
        write(root / "car_ims" / f"{number}.jpg", picture(number, SIZE))
    rows = [(f"car_ims/{number}.jpg", 1 + number % 2, number > 4) for number in range(1, 7)]
    fields = [(name, object) for name in ("relative_im_path", "class", "test")]
    classes = np.array([["Audi TT", "BMW X5"]], dtype=object)
    scipy.io.savemat(root / "cars_annos.mat", {"annotations": np.array([rows], dtype=fields), "class_names": classes})
    vtab(root, ["cifar", "dtd"], count=2)


# -- what commands take from earlier ones ----------------------------------------------------------


def provide(command: Command) -> None:
    """What a command reads of the runs before it: fresh weights of the models that these train, and their folders."""
    for file in weight_files(command.words):
        if not Path(file).exists():
            make_weights(Path(file), written_by()[str(Path(file).parent)])
    if "released" in command.shape:
        make_released(command)
    if command.verb == "report":
        for folder in command.arguments.runs:
            if not Path(folder).exists():
                run(written_by()[folder])
    if command.verb == "models" and command.arguments.measured:
        row = {"model": "caformer_s18", "image_size": [224, 224], "dtype": "tf32", "mode": "inference"}
        rows = [{**row, "compiled": False, "images_per_second": 10.0}]
        write_finding(finding("bench", "t", ("a",), [], data={"rows": rows}), Path(command.arguments.measured).parent)


def make_weights(file: Path, writer: Command) -> None:
    """Fresh weights of the model that a command would train."""
    file.parent.mkdir(parents=True, exist_ok=True)
    asked, options = writer.arguments, pairs(writer.arguments.model_set, "--model-set")
    if writer.kind == "train segmentation":
        words = writer.recipe.segmentation
        sizes = {"width": 8, "auxiliary_width": 8, "image_size": 64, "mode": words.mode, "stride": 43}
        backbone: Any = {"backbone_options": options}
        model: Any = create_segmenter(asked.model, words.decoder, num_classes=150, **backbone, **sizes)
    else:
        classes = 21841 if writer.data == "imagenet21k" else 1000
        model = mixlab.create_model(asked.model, num_classes=classes, **options)
    mixlab.save_weights(model, file)


def make_released(command: Command) -> None:
    """Public weights in the cache, of the models that a command names."""
    words = [command.arguments.get("model"), *(word.partition("=")[0] for word in command.words)]
    for name in {word for word in words if word in mixlab.list_models("deit3_*")}:
        file = find_release(name).local
        if not file.exists():
            file.parent.mkdir(parents=True)
            mixlab.save_weights(mixlab.create_model(name, num_classes=1000), file)


def run(command: Command) -> None:
    """A command of the page at toy size: it ends well and leaves what it says."""
    provide(command)
    assert main(command.short) == 0, command
    assert all(Path(folder).exists() for folder in [command.arguments.get(name) for name in ("out", "chart")] if folder)
    if command.kind.startswith(("train", "finetune")):
        assert (Path(command.arguments.out) / "final.safetensors").exists()
    if command.kind == "bench":
        rows = json.loads((Path(command.arguments.out) / "bench.json").read_text())["data"]["rows"]
        assert [row["reason"] for row in rows if row["reason"]] == []
