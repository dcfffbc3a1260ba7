import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from mixlab.core.errors import DataError
from mixlab.data import open_data, splits
from mixlab.data.base import ImageData
from mixlab.data.cifar import CIFAR100
from tests.data.make import cifar10_pickles, cifar_images, sheets


def opened(spec: str, split: str = "test") -> ImageData:
    data = open_data(spec, split)  # type: ignore[arg-type]
    assert isinstance(data, ImageData)
    return data


def pixels(planes: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    return planes.reshape(3, 32, 32).transpose(1, 2, 0).tobytes()


def test_pickled_batches_load_in_order(tmp_path: Path) -> None:
    cifar10_pickles(tmp_path / "cifar-10-batches-py")
    data = opened(f"cifar10:{tmp_path}", "train")
    assert len(data) == 20
    assert data.label(4) == 1  # the first of the second batch
    assert data.read(4).tobytes() == pixels(cifar_images(4, 1)[0])
    assert data.class_names[0] == "airplane"


def test_there_is_no_val_split_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    cifar10_pickles(tmp_path)
    assert splits(f"cifar10:{tmp_path}") == ["train", "test"]
    with pytest.raises(DataError, match=r"no val split.*hold_out"):
        opened(f"cifar10:{tmp_path}", "val")


def test_binary_batches_load(tmp_path: Path) -> None:
    planes = cifar_images(3)
    raw = np.concatenate([np.array([[7], [8], [9]], np.uint8), planes], axis=1)
    (tmp_path / "test_batch.bin").write_bytes(raw.tobytes())
    data = opened(f"cifar10:{tmp_path}")
    assert [data.label(index) for index in range(3)] == [7, 8, 9]
    assert data.read(2).tobytes() == pixels(planes[2])


def test_sheets_of_the_npm_package_load(tmp_path: Path) -> None:
    sheets(tmp_path / "package")
    data = opened(f"cifar10:{tmp_path}", "train")
    assert data.label(4) == 4
    assert data.read(4).tobytes() == pixels(cifar_images(3, 1)[1])


@pytest.mark.parametrize("binary", [False, True])
def test_cifar100_has_its_fine_labels(binary: bool, tmp_path: Path) -> None:
    planes = cifar_images(2)
    if binary:
        raw = np.concatenate([np.array([[1, 99], [2, 0]], np.uint8), planes], axis=1)
        (tmp_path / "test.bin").write_bytes(raw.tobytes())
    else:
        batch = {b"data": planes, b"fine_labels": [99, 0], b"coarse_labels": [1, 2]}
        (tmp_path / "test").write_bytes(pickle.dumps(batch, protocol=2))
    data = opened(f"cifar100:{tmp_path}")
    assert [data.label(index) for index in range(2)] == [99, 0]
    assert data.read(1).tobytes() == pixels(planes[1])


def test_the_hundred_names_are_sorted_and_distinct() -> None:
    assert len(CIFAR100) == len(set(CIFAR100)) == 100
    assert list(CIFAR100) == sorted(CIFAR100)


class Malicious:
    """What an attacker would put into a batch."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    batch = {b"data": cifar_images(1), b"labels": Malicious(f"touch {trace}")}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(DataError, match=r"system"):
        opened(f"cifar10:{tmp_path}")
    assert not trace.exists()


@pytest.mark.parametrize("name", ["builtins.eval", "numpy.load", "numpy.core.multiarray.fromstring"])
def test_no_other_function_can_be_asked_for(name: str, tmp_path: Path) -> None:
    module, _, function = name.rpartition(".")
    (tmp_path / "test_batch").write_bytes(f"c{module}\n{function}\n(S'1'\ntR.".encode())
    with pytest.raises(DataError, match=function):
        opened(f"cifar10:{tmp_path}")


def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    batch = {b"data": np.array([None, None]), b"labels": [0, 0]}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(DataError, match="not of bytes"):
        opened(f"cifar10:{tmp_path}")


@pytest.mark.parametrize("raw", [b"", b"garbage", pickle.dumps([1, 2])])
def test_a_broken_batch_is_a_data_error(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "test_batch").write_bytes(raw)
    with pytest.raises(DataError, match="test_batch"):
        opened(f"cifar10:{tmp_path}")


def test_labels_outside_the_classes_are_an_error(tmp_path: Path) -> None:
    batch = {b"data": cifar_images(1), b"labels": [10]}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(DataError, match="labels from 10 to 10; expected 0 to 9"):
        opened(f"cifar10:{tmp_path}")


def test_a_folder_without_the_files_says_which_are_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data_batch_1.*test_batch\.bin"):
        opened(f"cifar10:{tmp_path}")
