from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io  # type: ignore[import-untyped]

from mixlab.core.errors import DataError
from mixlab.data import open_data, splits
from mixlab.data.base import ImageData
from mixlab.data.vtab import TASKS, open_vtab
from tests.data.make import idx, picture, write


def opened(spec: str, split: str) -> ImageData:
    data = open_data(spec, split)  # type: ignore[arg-type]
    assert isinstance(data, ImageData)
    return data


def labels(data: ImageData) -> list[int]:
    return [data.label(index) for index in range(len(data))]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_idx_files_load_packed_or_not(name: str, suffix: str, tmp_path: Path) -> None:
    images = np.random.RandomState(0).randint(0, 256, (3, 28, 28)).astype(np.uint8)
    idx(tmp_path / f"t10k-images-idx3-ubyte{suffix}", images)
    idx(tmp_path / f"t10k-labels-idx1-ubyte{suffix}", np.array([3, 1, 9], np.uint8))
    data = opened(f"{name}:{tmp_path}", "test")
    assert splits(f"{name}:{tmp_path}") == ["test"]
    assert labels(data) == [3, 1, 9]
    assert data.read(1).tobytes() == images[1].tobytes()
    assert data.read(1).mode == "L"


def test_a_short_idx_file_is_an_error(tmp_path: Path) -> None:
    idx(tmp_path / "t10k-images-idx3-ubyte", np.zeros((3, 28, 28), np.uint8))
    idx(tmp_path / "t10k-labels-idx1-ubyte", np.zeros(3, np.uint8))
    path = tmp_path / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"2351 values.*\(3, 28, 28\)"):
        opened(f"mnist:{tmp_path}", "test")


def test_labels_of_another_length_are_an_error(tmp_path: Path) -> None:
    idx(tmp_path / "t10k-images-idx3-ubyte", np.zeros((3, 28, 28), np.uint8))
    idx(tmp_path / "t10k-labels-idx1-ubyte", np.zeros(2, np.uint8))
    with pytest.raises(DataError, match="3 images but 2 labels"):
        opened(f"mnist:{tmp_path}", "test")


def test_flowers_have_the_publishers_sets(tmp_path: Path) -> None:
    scipy.io.savemat(tmp_path / "imagelabels.mat", {"labels": np.array([[5, 102, 1, 7]], np.uint8)})
    sets = {"trnid": np.array([[2, 1]]), "valid": np.array([[3]]), "tstid": np.array([[4]])}
    scipy.io.savemat(tmp_path / "setid.mat", sets)
    write(tmp_path / "jpg" / "image_00002.jpg", picture(2, (32, 24)))
    data = opened(f"flowers102:{tmp_path}", "train")
    assert labels(data) == [101, 4]
    assert data.read(0).size == (32, 24)
    assert labels(opened(f"flowers102:{tmp_path}", "val")) == [0]
    assert labels(opened(f"flowers102:{tmp_path}", "test")) == [6]


def cars_table(rows: list[tuple[Any, ...]], names: list[str]) -> np.ndarray[Any, Any]:
    return np.array([rows], dtype=[(name, object) for name in names])


def test_cars_load_from_the_devkit(tmp_path: Path) -> None:
    (tmp_path / "devkit").mkdir()
    cell = np.array([["Audi TT", "BMW X5"]], dtype=object)
    scipy.io.savemat(tmp_path / "devkit" / "cars_meta.mat", {"class_names": cell})
    fields = ["bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname"]
    rows = [(1, 2, 3, 4, 2, "00001.jpg"), (1, 2, 3, 4, 1, "00002.jpg")]
    scipy.io.savemat(tmp_path / "devkit" / "cars_train_annos.mat", {"annotations": cars_table(rows, fields)})
    write(tmp_path / "cars_train" / "00001.jpg", picture(0, (30, 20)))
    data = opened(f"cars:{tmp_path}", "train")
    assert data.class_names == ("Audi TT", "BMW X5")
    assert labels(data) == [1, 0]
    assert data.read(0).size == (30, 20)


def test_cars_test_annotations_without_classes_say_which_file_is_needed(tmp_path: Path) -> None:
    scipy.io.savemat(tmp_path / "cars_meta.mat", {"class_names": np.array([["a", "b"]], dtype=object)})
    rows = cars_table([(1, "00001.jpg"), (1, "00002.jpg")], ["bbox_x1", "fname"])
    scipy.io.savemat(tmp_path / "cars_test_annos_withlabels.mat", {"annotations": rows})
    with pytest.raises(DataError, match="get cars_test_annos_withlabels"):
        opened(f"cars:{tmp_path}", "test")


def test_cars_of_the_first_release_are_split_by_their_flag(tmp_path: Path) -> None:
    rows = [("car_ims/1.jpg", 1, 0), ("car_ims/2.jpg", 2, 1), ("car_ims/3.jpg", 2, 0)]
    table = cars_table(rows, ["relative_im_path", "class", "test"])
    cell = np.array([["Audi TT", "BMW X5"]], dtype=object)
    scipy.io.savemat(tmp_path / "cars_annos.mat", {"annotations": table, "class_names": cell})
    assert labels(opened(f"cars:{tmp_path}", "train")) == [0, 1]
    assert opened(f"cars:{tmp_path}", "test").name(0) == str(tmp_path / "car_ims" / "2.jpg")


def test_a_broken_mat_file_is_an_error(tmp_path: Path) -> None:
    for name in ("imagelabels.mat", "setid.mat"):
        (tmp_path / name).write_bytes(b"not a mat file")
    with pytest.raises(DataError, match=r"setid\.mat is not a readable"):
        opened(f"flowers102:{tmp_path}", "train")


def test_vtab_has_7_natural_4_specialized_and_8_structured_tasks() -> None:
    categories = [task.category for task in TASKS.values()]
    assert [categories.count(name) for name in ("natural", "specialized", "structured")] == [7, 4, 8]


@pytest.mark.parametrize("inside", [True, False])
def test_a_vtab_task_loads_from_its_lists(inside: bool, tmp_path: Path) -> None:
    task = tmp_path / "svhn"
    write(task / "images" / "train" / "0.png", picture(4))
    for name, text in {"train800": "images/train/0.png 3\n", "val200": "images/v.png 9\n", "test": "x.png 0\n"}.items():
        (task / f"{name}.txt").write_text(text)
    spec = f"vtab/svhn:{tmp_path if inside else task}"
    data = opened(spec, "train")
    assert splits(spec) == ["train", "val", "test"]
    assert (labels(data), len(data.class_names)) == ([3], 10)
    assert data.read(0).tobytes() == picture(4).tobytes()


def test_the_thousand_images_of_vtab_are_one_split_too(tmp_path: Path) -> None:
    (tmp_path / "train800val200.txt").write_text("a.png 1\nb.png 0\n")
    assert labels(open_vtab("svhn", tmp_path, "trainval")) == [1, 0]


def test_a_vtab_label_outside_the_task_is_named(tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_text("a.png 1\nb.png 10\n")
    with pytest.raises(DataError, match=r"Line 2 .*under 10"):
        opened(f"vtab/svhn:{tmp_path}", "test")
