"""From a name or a path to a data set."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import ImageFolder

import selfcon.data
from selfcon.data.sources import _read_digits
from selfcon.errors import BadImageError, DataError, InputMissingError, SelfconWarning, UnsafeError, UsageError


def test_digits() -> None:
    source = selfcon.data.load("digits")
    assert (len(source.train), len(source.test), source.may_flip) == (1437, 360, False)
    assert source.train[0].shape == (16, 16, 3)
    assert source.train.shape == (16, 16)
    assert np.bincount(source.test.labels).tolist() == [36, 37, 35, 37, 36, 36, 36, 36, 35, 36]  # 20 % of each digit


def test_digits_are_read_as_scikit_learn_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _read_digits()
    monkeypatch.setattr(Path, "is_file", lambda path: False)  # the file has another place
    assert np.array_equal(rows, _read_digits())


def test_a_folder_is_read_as_torchvision_reads_it(folder: Path) -> None:
    source = selfcon.data.load(folder)
    theirs = ImageFolder(str(folder / "train"))
    assert list(source.classes) == theirs.classes == ["a b", "zebra", "ç[1]"]
    assert source.train.labels.tolist() == theirs.targets
    assert [source.train.describe(index) for index in range(18)] == [path for path, _ in theirs.samples]
    assert np.array_equal(source.train[3], np.asarray(theirs[3][0]))
    assert len(source.test) == 9


def test_val_beside_test_is_the_held_out_part(folder: Path) -> None:
    (folder / "test").rename(folder / "val")
    assert selfcon.data.load(folder).val is None
    assert len(selfcon.data.load(folder).test) == 9
    (folder / "val" / "zebra" / "0.png").unlink()
    (folder / "test").mkdir()
    for name in ("a b", "ç[1]", "zebra"):
        (folder / "train" / name).joinpath("5.png").rename(_made(folder / "test" / name) / "5.png")
    source = selfcon.data.load(folder)
    assert {split: len(images) for split, images in source.splits().items()} == {"train": 15, "val": 8, "test": 3}


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def test_a_single_folder_is_split_by_class(folder: Path) -> None:
    first = selfcon.data.load(folder / "train")
    assert (len(first.train), len(first.test)) == (14, 4)
    assert selfcon.data.load(folder / "train").name == "train"
    assert set(first.test.labels) == {0, 1, 2}
    again, other = selfcon.data.load(folder / "train"), selfcon.data.load(folder / "train", seed=1)
    assert again.test.paths == first.test.paths  # type: ignore[attr-defined]
    assert other.test.paths != first.test.paths  # type: ignore[attr-defined]
    assert not set(first.train.paths) & set(first.test.paths)  # type: ignore[attr-defined]


def test_every_class_of_a_single_folder_is_tested(tmp_path: Path, patches: Any) -> None:
    for label in range(10):
        for number in range(2):
            Image.fromarray(patches[label * 2 + number]).save(_made(tmp_path / "set" / str(label)) / f"{number}.png")
    source = selfcon.data.load(tmp_path / "set")
    assert sorted(source.test.labels) == sorted(source.train.labels) == list(range(10))
    (tmp_path / "set" / "3" / "1.png").unlink()
    with pytest.raises(DataError, match="has one image of '3', and needs one to train with and one to test on"):
        selfcon.data.load(tmp_path / "set")


@pytest.mark.parametrize("names", [("Train", "Test"), ("val", "test"), ("training", "validation")])
def test_splits_are_not_taken_for_classes(tmp_path: Path, patches: Any, names: tuple[str, str]) -> None:
    for name in names:
        for label in ("cat", "dog"):
            Image.fromarray(patches[0]).save(_made(tmp_path / name / label) / "x.png")
    with pytest.raises(DataError, match="look like splits and not like classes"):
        selfcon.data.load(tmp_path)


def test_folders_that_are_nearly_right_are_told_how(folder: Path, tmp_path: Path) -> None:
    (folder / "test").rename(folder / "valid")
    with pytest.raises(InputMissingError, match="has 'valid' beside train: call it test"):
        selfcon.data.load(folder)
    wrapped = tmp_path / "wrapped"
    wrapped.mkdir()
    folder.rename(wrapped / "inner")
    with pytest.raises(DataError, match=r"holds nothing but inner, which has folders in it: use .*wrapped/inner\."):
        selfcon.data.load(wrapped)
    (tmp_path / "labels.csv").write_text("x.png,cat\n")
    with pytest.raises(DataError, match="a folder for every class"):
        selfcon.data.load(tmp_path / "labels.csv")
    with pytest.raises(UsageError, match=r"no data set of that name \(cifar10, "):
        selfcon.data.load("qqqq")


def test_links_that_lead_back_pipes_and_closed_folders(folder: Path) -> None:
    (folder / "train" / "zebra" / "up").symlink_to("..")
    (folder / "train" / "a b" / "here").symlink_to(".")
    os.mkfifo(folder / "train" / "zebra" / "pipe.png")
    source = selfcon.data.load(folder)
    zebras = [path for path in source.train.paths if "zebra" in path.parts and "up" not in path.parts]  # type: ignore[attr-defined]
    assert len(zebras) == 6
    assert len([path for path in source.train.paths if "here" in path.parts]) == 0  # type: ignore[attr-defined]


def test_other_splits_beside_are_told(folder: Path) -> None:
    (folder / "validation" / "x").mkdir(parents=True)
    with pytest.warns(SelfconWarning, match="has 'validation' too, which is not used"):
        selfcon.data.load(folder)


def test_what_is_wrong_with_a_folder(folder: Path) -> None:
    (folder / "train" / ".hidden").mkdir()
    (folder / "train" / "zebra" / "notes.txt").write_text("no image")
    selfcon.data.load(folder)
    (folder / "train" / "empty").mkdir()
    with pytest.raises(DataError, match=r"test has no folder for 'empty', which train has"):
        selfcon.data.load(folder)
    (folder / "test" / "empty").mkdir()
    with pytest.raises(DataError, match=r"train has no images of 'empty'"):
        selfcon.data.load(folder)
    (folder / "train" / "empty").rmdir()
    with pytest.raises(DataError, match=r"test has the classes 'empty', which train has not"):
        selfcon.data.load(folder)
    (folder / "test").rename(folder / "else")
    with pytest.raises(InputMissingError, match="neither test nor val"):
        selfcon.data.load(folder)


def test_bad_images_stop_or_are_left_out_and_listed(tmp_path: Path, patches: Any) -> None:
    for label in ("x", "y"):
        for number in range(600):
            place = _made(tmp_path / "set" / label)
            Image.fromarray(patches[number]).save(place / f"{number:04d}.png", compress_level=0)
    bad = tmp_path / "set" / "x" / "0007.png"
    bad.write_bytes(b"")
    source = selfcon.data.load(tmp_path / "set")
    everything = [(images, index) for images in source.splits().values() for index in range(len(images))]
    with pytest.raises(BadImageError, match=r"0007\.png is empty"):
        _ = [images[index] for images, index in everything]
    with pytest.warns(SelfconWarning, match=r"1 of 1200 images cannot be read and are left out: .*0007\.png"):
        source = selfcon.data.load(tmp_path / "set", bad_images="skip")
    assert len(source.train) + len(source.test) == 1199
    for number in range(3):
        (tmp_path / "set" / "y" / f"{number:04d}.png").write_text("broken")
    with pytest.raises(DataError, match=r"4 of 1200 images of set cannot be read, more than one in a thousand"):
        selfcon.data.load(tmp_path / "set", bad_images="skip")
    with pytest.raises(UsageError, match="Unknown way to treat bad images 'ignore'"):
        selfcon.data.load(tmp_path / "set", bad_images="ignore")  # type: ignore[arg-type]


def write_npz(path: Path, **changes: Any) -> Path:
    arrays = {
        "x_train": np.zeros((6, 8, 8, 3), np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": np.zeros((3, 8, 8, 3), np.uint8),
        "y_test": np.array([0, 1, 2]),
        **changes,
    }
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def test_npz(tmp_path: Path) -> None:
    source = selfcon.data.load(write_npz(tmp_path / "x.npz", classes=np.array(["cat", "dog", "emu"])))
    assert (source.name, source.classes, len(source.train), len(source.test)) == ("x", ("cat", "dog", "emu"), 6, 3)
    grey = np.arange(6 * 64, dtype=np.uint8).reshape(6, 8, 8)
    source = selfcon.data.load(write_npz(tmp_path / "g.npz", x_train=grey, x_test=grey[:3]))
    assert source.classes == ("0", "1", "2")
    assert np.array_equal(source.train[2][..., 1], grey[2])
    assert source.val is None
    held = {"x_val": np.ones((2, 8, 8, 3), np.uint8), "y_val": np.array([2, 1])}
    source = selfcon.data.load(write_npz(tmp_path / "v.npz", **held))
    assert source.val is not None
    assert source.val.labels.tolist() == [2, 1]
    assert source.val[0].max() == 1


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"y_test": None}, DataError, r"has no y_test; it has x_train, y_train, x_test"),
        ({"x_train": np.zeros((6, 8, 8, 3))}, DataError, r"x_train as uint8 .* not float64 \[6, 8, 8, 3\]"),
        ({"x_train": np.zeros((6, 3, 8, 8), np.uint8)}, DataError, r"x_train as uint8 \[N, H, W, 3\]"),
        ({"x_test": np.zeros((3, 9, 9, 3), np.uint8)}, DataError, "to train with and of"),
        ({"x_test": np.zeros((0, 8, 8, 3), np.uint8), "y_test": np.zeros(0, int)}, DataError, "no images in x_test"),
        ({"y_train": np.zeros(5, int)}, DataError, "y_train as 6 integers"),
        ({"y_train": np.zeros(6)}, DataError, "y_train as 6 integers, one for each image, not float64"),
        ({"y_test": np.array([0, 1, 3])}, DataError, "has the label 3 in test, and labels are 0 to 2"),
        ({"y_test": np.array([0, 1, -1])}, DataError, "has the label -1 in test"),
        ({"y_train": np.array([0, 0, 0, 2, 2, 2])}, DataError, "no training images of '1'"),
        ({"y_train": np.zeros(6, int), "y_test": np.zeros(3, int)}, DataError, "at least two are needed"),
        ({"classes": np.array(["a", "b"])}, DataError, "has the label 2 in train, and labels are 0 to 1"),
        ({"classes": np.array(["a", "b", "a"])}, DataError, "names a class twice"),
        ({"classes": np.array("abc")}, DataError, "classes as a row of texts"),
        ({"y_train": np.array([0, 1, 2, 0, 1, 3 * 10**9])}, DataError, "more than there are images"),
        ({"x_train": np.array([object()] * 6)}, UnsafeError, "Python objects"),
        ({"x_val": np.zeros((2, 8, 8, 3), np.uint8)}, DataError, "has no y_val"),
    ],
)
def test_wrong_npz(tmp_path: Path, changes: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        selfcon.data.load(write_npz(tmp_path / "x.npz", **changes))


@pytest.mark.medium
def test_only_what_is_needed_of_an_npz_is_unpacked(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "x.npz", classes=np.array([b"cat", b"dog", b"emu"]))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("unused.npy", b"\0" * 100_000_000)
    assert selfcon.data.load(path).classes == ("cat", "dog", "emu")
    bomb = zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED)
    with bomb, bomb.open("x_train.npy", "w", force_zip64=True) as member:
        for _ in range(1100):
            member.write(b"\0" * (1 << 20))
    with pytest.raises(UnsafeError, match="would unpack"):
        selfcon.data.load(tmp_path / "bomb.npz")
    with zipfile.ZipFile(tmp_path / "lie.npz", "w") as file, file.open("x_train.npy", "w") as member:
        np.lib.format.write_array_header_1_0(
            member, {"descr": "|u1", "fortran_order": False, "shape": (10**13, 8, 8, 3)}
        )
    with pytest.raises(DataError, match="does not fit its contents"):
        selfcon.data.load(tmp_path / "lie.npz")
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as file:
        file.writestr("x_train.npy", "not an array")
    with pytest.raises(DataError, match="cannot be read as an"):
        selfcon.data.load(tmp_path / "text.npz")


def test_images_of_a_script(folder: Path) -> None:
    paths: Any = sorted(folder.rglob("*.png"))
    assert len(paths) > 2
    labels: Any = [0] * len(paths)
    images = selfcon.data.FileImages([str(path) for path in paths], labels)  # type: ignore[misc]
    assert images.paths == paths
    assert images.labels.tolist() == labels
    with pytest.raises(DataError, match="1 labels for"):
        selfcon.data.FileImages(paths, labels[:1])
    wrong: list[Any] = [[0.5] * 4, ["a"] * 4, np.zeros((4, 2), np.int64)]
    for each in wrong:
        with pytest.raises(DataError, match="one whole number a label"):
            selfcon.data.ArrayImages(np.zeros((4, 2, 2, 3), np.uint8), each, "mine")
    with pytest.raises(UsageError, match="what a script adds is known to that script"):
        selfcon.data.load("qqq")


def test_a_path_is_never_a_name(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder.rename(tmp_path / "digits")
    with pytest.raises(InputMissingError, match="did you mean 'digits'"):
        selfcon.data.load(Path("digit"))
    assert len(selfcon.data.load(Path("digits")).train) == 18
    assert len(selfcon.data.load("./digits").train) == 18
    assert len(selfcon.data.load("digits").train) == 1437


def test_files_that_are_no_data_sets(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_text("nothing")
    with pytest.raises(DataError, match=r"cannot be read as an \.npz"):
        selfcon.data.load(tmp_path / "x.npz")
    (tmp_path / "x.bin").write_text("nothing")
    with pytest.raises(DataError, match=r"neither an \.npz nor a file that"):
        selfcon.data.load(tmp_path / "x.bin")
    with pytest.raises(InputMissingError, match="There is no file or folder"):
        selfcon.data.load(tmp_path / "nothing")
    with pytest.raises(UsageError, match="did you mean 'cifar10'"):
        selfcon.data.load("cifar-10")


def test_torchvision_names_read_files_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(InputMissingError, match=r"put FashionMNIST/raw there, or download it: .* --download"):
        selfcon.data.load("fashion-mnist", root=tmp_path)
    raw = _made(tmp_path / "FashionMNIST" / "raw")
    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("t10k", 10)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes())
        labels = np.arange(count, dtype=np.uint8) % 10
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())
    source = selfcon.data.load("fashion-mnist", root=tmp_path)
    assert (len(source.train), len(source.test), source.train.shape) == (20, 10, (28, 28))
    assert source.classes[0] == "T-shirt/top"


def test_torchvision_names_that_keep_files(tmp_path: Path, patches: Any) -> None:
    pets = tmp_path / "oxford-iiit-pet"
    for number, name in enumerate(("Beagle_1", "Bengal_1", "Beagle_2", "Bengal_2")):
        Image.fromarray(patches[number]).save(_made(pets / "images") / f"{name}.jpg")
    for split, rows in (
        ("trainval", ("Beagle_1 1 1 1", "Bengal_1 2 1 1")),
        ("test", ("Beagle_2 1 1 1", "Bengal_2 2 1 1")),
    ):
        (_made(pets / "annotations") / f"{split}.txt").write_text("\n".join(rows))
    source = selfcon.data.load("oxford-iiit-pet", root=tmp_path)
    assert (source.classes, source.test.labels.tolist()) == (("Beagle", "Bengal"), [0, 1])
    assert source.train[0].shape == (32, 32, 3)

    food = tmp_path / "food-101"
    for split, number in (("train", 1), ("test", 2)):
        listed = {}
        for label, name in enumerate(("apple_pie", "waffles")):
            Image.fromarray(patches[10 + label]).save(_made(food / "images" / name) / f"{number}.jpg")
            listed[name] = [f"{name}/{number}"]
        (_made(food / "meta") / f"{split}.json").write_text(json.dumps(listed))
    source = selfcon.data.load("food101", root=tmp_path)
    assert (source.classes, source.train.labels.tolist()) == (("apple_pie", "waffles"), [0, 1])


def test_validation_images_of_their_authors(tmp_path: Path) -> None:
    labels = tmp_path / "dtd" / "dtd" / "labels"
    labels.mkdir(parents=True)
    for number, split in enumerate(("train", "val", "test")):
        names = [f"{kind}/{kind}_{number}.jpg" for kind in ("banded", "zigzagged")]
        (labels / f"{split}1.txt").write_text("\n".join(names) + "\n")
        for name in names:
            path = tmp_path / "dtd" / "dtd" / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 8), (number, 0, 0)).save(path)
    source = selfcon.data.load("dtd", root=tmp_path)
    assert source.val is not None
    assert [len(images) for images in source.splits().values()] == [2, 2, 2]
    assert list(source.splits()) == ["train", "val", "test"]


def test_damaged_torchvision_files(tmp_path: Path) -> None:
    raw = _made(tmp_path / "MNIST" / "raw")
    for name in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ):
        (raw / name).write_bytes(b"\0\0\x08\x03" + b"\0" * 5)
    with pytest.raises(DataError, match=r"mnist in .* cannot be read"):
        selfcon.data.load("mnist", root=tmp_path)


def test_every_name_says_where_its_files_go(tmp_path: Path) -> None:
    for name in selfcon.data.list_sources():
        if name != "digits":
            with pytest.raises((InputMissingError, UsageError)):
                selfcon.data.load(name, root=tmp_path)


def test_tiny_imagenet_as_it_is_published(tmp_path: Path, patches: Any) -> None:
    root = tmp_path / "tiny-imagenet-200"
    for label, wnid in enumerate(("n002", "n001")):
        for number in range(3):
            place = _made(root / "train" / wnid / "images")
            Image.fromarray(patches[label * 10 + number]).save(place / f"{wnid}_{number}.JPEG")
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("boxes")
    lines = []
    for number, wnid in enumerate(("n001", "n002", "n001")):
        Image.fromarray(patches[50 + number]).save(_made(root / "val" / "images") / f"val_{number}.JPEG")
        lines.append(f"val_{number}.JPEG\t{wnid}\t0\t0\t62\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines))
    source = selfcon.data.load("tiny-imagenet", root=tmp_path)
    assert source.classes == ("n001", "n002")
    assert (source.test.labels.tolist(), len(source.train)) == ([0, 1, 0], 6)
    assert source.test[1].shape == (32, 32, 3)
    assert selfcon.data.load("tiny-imagenet", root=root).classes == source.classes
    (root / "val" / "val_annotations.txt").write_text("../../etc/passwd\tn001")
    with pytest.raises(DataError, match="line 1, does not name an image"):
        selfcon.data.load("tiny-imagenet", root=tmp_path)


def test_imagenet_and_a_choice_of_its_classes(tmp_path: Path, patches: Any) -> None:
    for split in ("train", "val"):
        for wnid in ("n03", "n01", "n02"):
            Image.fromarray(patches[0]).save(_made(tmp_path / "imagenet" / split / wnid) / "x.JPEG")
    assert selfcon.data.load("imagenet", root=tmp_path).classes == ("n01", "n02", "n03")
    chosen = tmp_path / "classes.txt"
    chosen.write_text("\ufeffn03 a name\n\n# a comment\nn01\n")
    source = selfcon.data.load("imagenet100", root=tmp_path, class_list=chosen)
    assert (source.classes, len(source.train)) == (("n01", "n03"), 2)
    with pytest.raises(UsageError, match="--class-list"):
        selfcon.data.load("imagenet100", root=tmp_path)
    chosen.write_text("n01\nn77\n")
    with pytest.raises(DataError, match="names 'n77', not in"):
        selfcon.data.load("imagenet100", root=tmp_path, class_list=chosen)
    with pytest.raises(UsageError, match="goes with imagenet"):
        selfcon.data.load("digits", class_list=chosen)
    with pytest.raises(InputMissingError, match="class list"):
        selfcon.data.load("imagenet100", root=tmp_path, class_list=tmp_path / "none.txt")


def test_holding_out_is_stratified_and_leaves_test_alone(folder: Path) -> None:
    source = selfcon.data.load("digits").hold_out(0.1, seed=3)
    assert source.val is not None
    assert (len(source.train), len(source.val), len(source.test)) == (1293, 144, 360)
    share = np.bincount(source.val.labels) / np.bincount(np.concatenate([source.train.labels, source.val.labels]))
    assert share.min() > 0.095
    assert share.max() < 0.105
    same = selfcon.data.load("digits").hold_out(0.1, seed=3)
    assert np.array_equal(same.val.pixels, source.val.pixels)  # type: ignore[union-attr, attr-defined]
    assert selfcon.data.load(folder).hold_out(0.0).val is None
    small = selfcon.data.load(folder).hold_out(0.8)
    assert set(small.train.labels) == {0, 1, 2}  # every class keeps one
    for wrong in (-0.1, 1.0):
        with pytest.raises(UsageError, match="at least 0 and less than 1"):
            source.hold_out(wrong)
    with pytest.raises(UsageError, match="already has a held-out part"):
        source.hold_out(0.1)
    with pytest.raises(UsageError, match="each class must keep one"):
        selfcon.data.load(folder).hold_out(0.9)


@pytest.mark.parametrize(
    "pixels", [np.zeros((2, 4, 4, 3), np.float32), np.zeros((2, 4, 4), np.uint8), np.zeros((2, 4, 4, 4), np.uint8)]
)
def test_pixels_that_are_no_images(pixels: Any) -> None:
    with pytest.raises(DataError, match=r"mine wants pixels of uint8.*\[N, H, W, 3\], not"):
        selfcon.data.ArrayImages(pixels, np.arange(2), "mine")
