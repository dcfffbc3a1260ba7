"""The 19 tasks of VTAB-1K from the folders that fine-tuning papers share: TASK/images and lists of 'path label'."""

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal

from mixlab.core.errors import DataError
from mixlab.data.kinds import FileData

SPLIT_FILES = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt", "trainval": "train800val200.txt"}


@dataclass(frozen=True)
class VtabTask:
    category: Literal["natural", "specialized", "structured"]
    classes: int


# In the order of Vision-LSTM's Table 8
TASKS = {
    "cifar": VtabTask("natural", 100),
    "caltech101": VtabTask("natural", 102),
    "dtd": VtabTask("natural", 47),
    "oxford_flowers102": VtabTask("natural", 102),
    "oxford_iiit_pet": VtabTask("natural", 37),
    "svhn": VtabTask("natural", 10),
    "sun397": VtabTask("natural", 397),
    "patch_camelyon": VtabTask("specialized", 2),
    "eurosat": VtabTask("specialized", 10),
    "resisc45": VtabTask("specialized", 45),
    "diabetic_retinopathy": VtabTask("specialized", 5),
    "clevr_count": VtabTask("structured", 8),
    "clevr_dist": VtabTask("structured", 6),
    "dmlab": VtabTask("structured", 6),
    "kitti": VtabTask("structured", 4),
    "dsprites_loc": VtabTask("structured", 16),
    "dsprites_ori": VtabTask("structured", 16),
    "smallnorb_azi": VtabTask("structured", 18),
    "smallnorb_ele": VtabTask("structured", 9),
}
ALL, PREFIX = "vtab:", "vtab/"  # how the names of all tasks and of one task begin


def expand(datasets: Iterable[str | PathLike[str]]) -> list[str | PathLike[str]]:
    """The datasets with "vtab:PATH" replaced by the tasks that have a folder below PATH."""
    expanded: list[str | PathLike[str]] = []
    for data in datasets:
        if not isinstance(data, str) or not data.startswith(ALL):
            expanded.append(data)
            continue
        root = Path(data.removeprefix(ALL)).expanduser()
        tasks = [task for task in TASKS if (root / task).is_dir()]
        if not tasks:
            raise DataError(
                f"No task of VTAB-1K was found below {root}. Expected one folder per task ({', '.join(TASKS)}), each "
                f"with {', '.join(list(SPLIT_FILES.values())[:3])} and the images that these lists name."
            )
        expanded += [f"{PREFIX}{task}:{root}" for task in tasks]
    return expanded


def task_name(data: str | PathLike[str]) -> str | None:
    """The task that a dataset "vtab/TASK:PATH" names; None for any other dataset."""
    name = str(data).partition(":")[0].removeprefix(PREFIX)
    return name if str(data).startswith(PREFIX) and name in TASKS else None


def vtab_splits(task: str, root: Path) -> list[str]:
    return [split for split in ("train", "val", "test") if (place(task, root) / SPLIT_FILES[split]).is_file()]


def open_vtab(task: str, root: Path, split: str) -> FileData:
    """A split, or "trainval" for all 1000 training images. Class names are the numbers in the lists."""
    folder = place(task, root)
    file, classes = folder / SPLIT_FILES[split], TASKS[task].classes
    if not file.is_file():
        raise DataError(f"{file} does not exist. {expected(task)}")
    paths, labels = [], []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        path, _, label = line.strip().rpartition(" ")
        if not path or not label.isdigit() or int(label) >= classes:
            raise DataError(f"Line {number} of {file} is {line!r}; expected a path and a label under {classes}.")
        paths.append(folder / path.strip())
        labels.append(int(label))
    return FileData(paths, labels, [str(number) for number in range(classes)])


def place(task: str, root: Path) -> Path:
    """The folder of a task: inside the root, or the root itself."""
    return root / task if (root / task).is_dir() else root


def expected(task: str) -> str:
    return f"Expected {task}/{SPLIT_FILES['train']}, {SPLIT_FILES['val']}, {SPLIT_FILES['test']} and {task}/images."
