import pickle
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import pytest

from mixlab.core.errors import DataError, UnreadableImage
from mixlab.data import open_data, splits
from mixlab.data.base import ImageData
from tests.data.make import packed, picture


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def table(count: int, *, image: str = "image", label: str = "label", names: bool = True) -> Any:
    cells = [{"bytes": packed(picture(number)), "path": None} for number in range(count)]
    kind = datasets.ClassLabel(names=["cat", "dog"]) if names else datasets.Value("string")
    values = [number % 2 if names else ["dog", "cat"][number % 2] for number in range(count)]
    features = datasets.Features({image: datasets.Image(), label: kind})
    return datasets.Dataset.from_dict({image: cells, label: values}, features=features)


def opened(spec: str | Path, split: str = "train") -> ImageData:
    data = open_data(spec, split)  # type: ignore[arg-type]
    assert isinstance(data, ImageData)
    return data


def test_parquet_loads_with_its_class_names(tmp_path: Path) -> None:
    table(3).to_parquet(tmp_path / "images.parquet")
    data = opened(tmp_path / "images.parquet")
    assert data.class_names == ("cat", "dog")
    assert [data.label(index) for index in range(3)] == [0, 1, 0]
    assert data.read(2).tobytes() == picture(2).tobytes()


def test_splits_are_told_by_file_names(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table(4).to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    table(2).to_parquet(tmp_path / "data" / "validation-00000-of-00001.parquet")
    assert splits(tmp_path) == ["train", "val"]
    assert len(opened(tmp_path, "val")) == 2


def test_a_saved_dataset_loads(tmp_path: Path) -> None:
    saved = datasets.DatasetDict({"train": table(4), "test": table(2)})
    saved.save_to_disk(tmp_path / "saved")
    assert splits(tmp_path / "saved") == ["train", "test"]
    data = opened(tmp_path / "saved", "test")
    assert data.read(1).tobytes() == picture(1).tobytes()


def test_an_arrow_file_loads(tmp_path: Path) -> None:
    table(3).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    assert len(opened(file)) == 3


def test_text_labels_are_sorted_classes(tmp_path: Path) -> None:
    table(3, names=False).to_parquet(tmp_path / "images.parquet")
    data = opened(tmp_path / "images.parquet")
    assert data.class_names == ("cat", "dog")
    assert data.label(0) == 1


def test_columns_of_other_names_can_be_named(tmp_path: Path) -> None:
    table(2, image="x", label="kind", names=False).to_parquet(tmp_path / "images.parquet")
    with pytest.raises(DataError, match=r"No label column.*x, kind.*\?image=COLUMN&label=COLUMN"):
        opened(tmp_path / "images.parquet")
    assert len(opened(f"{tmp_path / 'images.parquet'}?label=kind")) == 2


def test_it_can_be_sent_to_a_worker(tmp_path: Path) -> None:
    table(3).to_parquet(tmp_path / "images.parquet")
    copy = pickle.loads(pickle.dumps(opened(tmp_path / "images.parquet")))
    assert copy.read(1).tobytes() == picture(1).tobytes()


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    cells = [{"bytes": b"broken", "path": None}, {"bytes": b"too", "path": None}]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    broken = datasets.Dataset.from_dict({"image": cells, "label": [0, 1]}, features=features)
    broken.to_parquet(tmp_path / "images.parquet")
    with pytest.raises(UnreadableImage, match=r"images\.parquet/train\[1\]"):
        opened(tmp_path / "images.parquet").read(1)


def test_a_broken_file_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "images.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match="cannot be read"):
        opened(tmp_path / "images.parquet")
