"""Train a small model on a folder of images, one folder per class, and ask it about one of them.

python examples/train_on_a_folder.py PATH            # PATH/train/CLASS/*.jpg, PATH/val/CLASS/*.jpg, maybe PATH/test
python examples/train_on_a_folder.py                 # without a path: digits, written into such a folder first
"""

import argparse
import tempfile
from pathlib import Path

import mixlab
from mixlab.data import check_data, open_data


def write_digits(folder: Path, most: int = 400) -> Path:
    """The embedded digits as PNG files."""
    for split in ("train", "val"):
        digits = open_data("digits", split)
        for index in range(min(most, len(digits))):
            place = folder / split / digits.class_names[digits.label(index)]
            place.mkdir(parents=True, exist_ok=True)
            digits.read(index).save(place / f"{index:04}.png")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--model", default="caformer_pico")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", default=None, help="a new folder for the run; default: a temporary one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = asked.data or write_digits(Path(folder, "digits"))
        print(check_data(data).text())
        changes = {"schedule.epochs": asked.epochs, "schedule.warmup_epochs": 1, "augmentation.flip": 0.0}
        run = mixlab.train(asked.model, data, out=asked.out or Path(folder, "run"), changes=changes, workers=0)
        print(f"val top-1 {run.history[-1]['top1']:.1f}% after {asked.epochs} epochs")
        picture = sorted(Path(data, "val").rglob("*.*"))[0]
        (answer,) = mixlab.predict(run.folder / "final.safetensors", [picture], top=3)
        print(f"{picture.parent.name}/{picture.name}:", *zip(answer.classes, answer.probabilities, strict=True))


if __name__ == "__main__":
    main()
