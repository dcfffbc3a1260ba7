from pathlib import Path

import pytest

from mixlab.core.errors import DataError
from mixlab.data import open_data, splits
from mixlab.data.base import ImageData
from tests.data.make import picture, write


def listed(path: Path, text: str, split: str = "train") -> ImageData:
    path.write_text(text)
    data = open_data(path, split)  # type: ignore[arg-type]
    assert isinstance(data, ImageData)
    return data


def labels(data: ImageData) -> list[int]:
    return [data.label(index) for index in range(len(data))]


def test_paths_are_relative_to_the_list(tmp_path: Path) -> None:
    write(tmp_path / "images" / "a.png", picture(5))
    data = listed(tmp_path / "list.csv", "images/a.png,cat\nimages/b.png,dog\n")
    assert data.read(0).tobytes() == picture(5).tobytes()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.csv", "b.png,dog\na.png,cat\n"),
        ("list.csv", "path,label\nb.png,dog\na.png,cat\n"),
        ("list.csv", 'Label,Filename\r\ndog,b.png\r\ncat,"a.png"\r\n'),
        ("list.tsv", "b.png\tdog\na.png\tcat\n"),
        ("list.txt", "b.png dog\na.png cat\n"),
        ("list.txt", "b.png, dog\n\na.png, cat\n"),
        ("list.csv", "\ufeffb.png,dog\na.png,cat\n"),
    ],
)
def test_header_and_delimiter_are_found(name: str, text: str, tmp_path: Path) -> None:
    data = listed(tmp_path / name, text)
    assert data.class_names == ("cat", "dog")
    assert labels(data) == [1, 0]
    assert Path(data.name(0)) == tmp_path / "b.png"


def test_integer_labels_are_in_the_order_of_the_numbers(tmp_path: Path) -> None:
    data = listed(tmp_path / "list.csv", "a.png,10\nb.png,2\nc.png,0\n")
    assert data.class_names == ("0", "2", "10")
    assert labels(data) == [2, 1, 0]


def test_a_third_column_is_the_split(tmp_path: Path) -> None:
    text = "a.png,x,train\nb.png,y,train\nc.png,y,val\nd.png,x,test\n"
    data = listed(tmp_path / "list.csv", text, "val")
    assert splits(tmp_path / "list.csv") == ["train", "val", "test"]
    assert labels(data) == [1]  # numbered as in train
    assert data.class_names == ("x", "y")


def test_a_folder_of_lists_is_one_dataset(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a.png,x\nb.png,y\n")
    (tmp_path / "val.csv").write_text("c.png,y\n")
    data = open_data(tmp_path, "val")
    assert splits(tmp_path) == ["train", "val"]
    assert isinstance(data, ImageData)
    assert labels(data) == [1]


def test_a_label_that_train_does_not_have_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'z'.*training images"):
        listed(tmp_path / "list.csv", "a.png,x,train\nb.png,y,train\nc.png,z,val\n", "val")


def test_a_broken_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Row 2 .*'b\.png'"):
        listed(tmp_path / "list.csv", "a.png,x\nb.png\n")


def test_an_unknown_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'holdout'; expected train, val or test"):
        listed(tmp_path / "list.csv", "a.png,x,holdout\n")


def test_an_empty_list_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No dataset"):
        listed(tmp_path / "list.csv", "")
