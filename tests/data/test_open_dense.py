from pathlib import Path

import pytest

from mixlab.core.errors import DataError
from mixlab.data.dense import MaskData, ObjectData
from mixlab.data.open_dense import dense_splits, open_dense


@pytest.mark.parametrize(("task", "kind"), [("segmentation", MaskData), ("detection", ObjectData)])
def test_scenes_open_by_name_for_both_tasks(task: str, kind: type) -> None:
    assert dense_splits("digit-scenes", task) == ["train", "val", "test"]
    assert isinstance(open_dense("digit-scenes", "val", task), kind)


@pytest.mark.parametrize(
    ("spec", "task", "message"),
    [
        ("nowhere", "segmentation", "ade20k:PATH"),
        ("ade2k:somewhere", "segmentation", "ade20k"),
        ("coco:nowhere", "detection", "is not a folder"),
        ("coco:nowhere", "segmentation", "Unknown dataset"),
    ],
)
def test_what_cannot_be_opened_says_what_can(spec: str, task: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_dense(spec, "train", task)


def test_a_folder_of_another_kind_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    for task in ("segmentation", "detection"):
        with pytest.raises(DataError, match="no dataset for"):
            open_dense(tmp_path, "train", task)
