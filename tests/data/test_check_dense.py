import json
from pathlib import Path

import numpy as np
from PIL import Image

from mixlab.data.check_dense import check_dense


def test_masks_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "images" / split).mkdir(parents=True)
        (tmp_path / "masks" / split).mkdir(parents=True)
        for index, (size, value) in enumerate([((8, 6), 1), ((5, 5), 1), ((8, 6), 77)]):
            Image.new("RGB", (8, 6)).save(tmp_path / "images" / split / f"{index}.png")
            mask = np.full((size[1], size[0]), value, dtype=np.uint8)
            Image.fromarray(mask).save(tmp_path / "masks" / split / f"{index}.png")
    (tmp_path / "classes.txt").write_text("ground\nsky\nnever\n")
    told: list[tuple[int, int]] = []
    report = check_dense(tmp_path, "segmentation", progress=lambda done, total: told.append((done, total)))
    assert report.splits == {"train": 3, "val": 3}
    assert report.classes["sky"] == {"train": 1, "val": 1}
    assert any("2 images cannot be used" in problem for problem in report.problems)
    assert any("never" in problem for problem in report.problems)
    assert told[-1] == (6, 6)


def test_boxes_and_images_that_are_missing_are_reported(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    Image.new("RGB", (20, 20)).save(tmp_path / "train" / "a.png")
    images = [{"id": i, "file_name": name, "width": 20, "height": 20} for i, name in enumerate(("a.png", "gone.png"))]
    boxes = [[1, 1, 5, 5], [3, 3, 0, 4]]
    objects = [{"id": i, "image_id": 0, "category_id": 7, "bbox": box} for i, box in enumerate(boxes)]
    listing = {"images": images, "annotations": objects, "categories": [{"id": 7, "name": "thing"}]}
    (tmp_path / "train.json").write_text(json.dumps(listing))
    report = check_dense(tmp_path, "detection")
    assert report.classes == {"thing": {"train": 1}}
    assert any("gone.png" in problem for problem in report.problems)
    assert len(report.problems) >= 2


def test_the_embedded_scenes_have_no_problems() -> None:
    assert check_dense("digit-scenes", "detection").problems == []
