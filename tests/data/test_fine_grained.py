"""Data sets for transfer in the layouts of their authors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import selfcon
from selfcon.data.fine_grained import FINE_GRAINED
from selfcon.errors import DataError, InputMissingError

FILES = {"train": ["sparrow/a.jpg", "wren/b.jpg"], "test": ["wren/c.jpg", "sparrow/d.jpg", "wren/e.jpg"]}


def write_images(folder: Path, *, flat: bool = False) -> None:
    for file in (*FILES["train"], *FILES["test"]):
        path = folder / (Path(file).name if flat else file)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 8), (200, 10, 10)).save(path)


def write_cub(root: Path) -> None:
    folder = root / "CUB_200_2011"
    write_images(folder / "images")
    files = [*FILES["train"], *FILES["test"]]
    tables: dict[str, Sequence[object]] = {
        "images": files,
        "image_class_labels": [1 if file.startswith("sparrow") else 2 for file in files],
        "train_test_split": [int(file in FILES["train"]) for file in files],
    }
    for name, values in tables.items():
        (folder / f"{name}.txt").write_text("".join(f"{row} {value}\n" for row, value in enumerate(values, start=1)))
    (folder / "classes.txt").write_text("1 sparrow\n2 wren\n")


def write_dogs(root: Path) -> None:
    from scipy.io import savemat

    folder = root / "stanford-dogs"
    write_images(folder / "Images")
    for split, files in FILES.items():
        cells = np.empty((len(files), 1), dtype=object)
        cells[:, 0] = files
        savemat(folder / f"{split}_list.mat", {"file_list": cells})


def write_mit67(root: Path) -> None:
    folder = root / "mit67"
    write_images(folder / "Images")
    for split, files in FILES.items():
        (folder / f"{split.capitalize()}Images.txt").write_text("\n".join(files) + "\n")


def write_stanford40(root: Path) -> None:
    folder = root / "stanford40"
    write_images(folder / "JPEGImages", flat=True)
    (folder / "ImageSplits").mkdir()
    (folder / "ImageSplits" / "actions.txt").write_text("action_name number\nsparrow 2\nwren 3\n")
    for split, files in FILES.items():
        for action in ("sparrow", "wren"):
            chosen = [Path(file).name for file in files if file.startswith(action)]
            (folder / "ImageSplits" / f"{action}_{split}.txt").write_text("\n".join(chosen))


WRITERS: dict[str, Callable[[Path], None]] = {
    "cub": write_cub,
    "stanford-dogs": write_dogs,
    "mit67": write_mit67,
    "stanford40": write_stanford40,
}


@pytest.mark.parametrize("name", FINE_GRAINED)
def test_splits_and_classes_are_those_of_the_authors(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    source = selfcon.data.load(name, root=tmp_path)
    assert source.classes == ("sparrow", "wren")
    for images, files in ((source.train, FILES["train"]), (source.test, FILES["test"])):
        found = {Path(images.describe(row)).name: source.classes[images.labels[row]] for row in range(len(images))}
        assert found == {Path(file).name: file.split("/")[0] for file in files}
    assert source.train[0].shape == (8, 9, 3)


@pytest.mark.parametrize("name", FINE_GRAINED)
def test_what_is_missing_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputMissingError, match=f"{name} is not in .*put the folder {FINE_GRAINED[name][0]} there"):
        selfcon.data.load(name, root=tmp_path)
    WRITERS[name](tmp_path)
    image = next(tmp_path.rglob("b.jpg"))
    image.unlink()
    with pytest.raises(DataError, match=r"1 images that are not there: .*b\.jpg"):
        selfcon.data.load(name, root=tmp_path)
    lists = {"cub": "train_test_split.txt", "stanford-dogs": "test_list.mat", "mit67": "TestImages.txt"}
    split_file = next(tmp_path.rglob(lists.get(name, "wren_test.txt")))
    split_file.unlink()
    with pytest.raises(InputMissingError, match=split_file.name):
        selfcon.data.load(name, root=tmp_path)


def test_broken_tables_are_named(tmp_path: Path) -> None:
    write_cub(tmp_path)
    (tmp_path / "CUB_200_2011" / "classes.txt").write_text("1 sparrow\n")
    with pytest.raises(DataError, match="without a class or a split"):
        selfcon.data.load("cub", root=tmp_path)
    (tmp_path / "CUB_200_2011" / "classes.txt").write_text("sparrow\n")
    with pytest.raises(DataError, match="not a number with a value"):
        selfcon.data.load("cub", root=tmp_path)
    write_dogs(tmp_path)
    (tmp_path / "stanford-dogs" / "train_list.mat").write_bytes(b"no such thing")
    with pytest.raises(DataError, match=r"train_list\.mat"):
        selfcon.data.load("stanford-dogs", root=tmp_path)
