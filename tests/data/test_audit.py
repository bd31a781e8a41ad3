"""`check` finds everything that is wrong at once, and draws a picture."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import selfcon.data
from selfcon.errors import UsageError


def test_a_sound_folder(folder: Path) -> None:
    audit, source = selfcon.data.check(folder)
    assert audit.exit_code == 0
    assert audit.images == {"train": 18, "test": 9}
    assert audit.smallest_class["train"][1] == audit.largest_class["train"][1] == 6
    assert audit.sizes["different"] == 1
    assert audit.sizes["most_common"] == {"width": 32, "height": 32, "images": 27}
    assert (audit.problems, audit.warnings, audit.unreadable, audit.notes) == ([], [], [], [])
    assert source.classes == tuple(audit.classes)


def test_where_test_images_come_from_is_noted(folder: Path) -> None:
    flat = folder / "train"
    for seed, runs in ((0, "whatever --seed a run has"), (3, "but runs always use seed 0")):
        audit, _ = selfcon.data.check(flat, seed=seed)
        assert audit.images == {"train": 14, "test": 4}
        assert audit.notes == [
            f"{flat} has no train folder, so 4 of its 18 images are held out for testing "
            f"(stratified, with the fixed seed {seed}, {runs})."
        ]
    (folder / "test").rename(folder / "val")
    audit, _ = selfcon.data.check(folder)
    assert audit.notes == [
        f"{folder} has no test folder, so val is the test set. Use --val-fraction to hold out part of train."
    ]
    shutil.copytree(folder / "val", folder / "test")
    assert selfcon.data.check(folder)[0].notes == []


def test_a_folder_broken_in_every_way(folder: Path) -> None:
    train, test = folder / "train", folder / "test"
    (train / "zebra" / "0.png").write_bytes(b"")
    (train / "zebra" / "1.png").write_text("text")
    (train / "a b" / "0.png").write_bytes((train / "a b" / "1.png").read_bytes())  # twice in train
    (test / "a b" / "0.png").write_bytes((train / "a b" / "2.png").read_bytes())  # in train and test
    (test / "ç[1]" / "0.png").write_bytes((train / "a b" / "3.png").read_bytes())  # under two labels
    Image.open(train / "ç[1]" / "1.png").save(train / "ç[1]" / "1.jpg", exif=b"Exif\x00\x00XX nonsense")
    (train / "ç[1]" / "1.png").unlink()
    (train / "ç[1]" / "notes.txt").write_text("")
    (train / "ç[1]" / "photo.heic").write_text("")
    shutil.copy(train / "a b" / "2.png", train / "beside.png")
    (train / "empty").mkdir()
    (test / "only here").mkdir()
    audit, _ = selfcon.data.check(folder)
    assert audit.exit_code == 65
    found = " ".join(audit.problems)
    for words in (
        "2 of 27 images cannot be read",
        "no folder for 'empty', which train has",
        "the classes 'only here', which train has not",
        "no images of 'empty'",
    ):
        assert found.count(words) == 1
    assert sorted(Path(line.split(" is ")[0]).name for line in audit.unreadable) == ["0.png", "1.png"]
    assert audit.duplicates == {"within train": 1, "within test": 0, "test in train": 2, "under two labels": 1}
    assert any("EXIF data of 1 image cannot be read" in warning for warning in audit.warnings)
    assert any(
        "2 files are not taken for images, by the endings: '.heic', '.txt'" in warning for warning in audit.warnings
    )
    assert any("1 image is beside the folders of the classes and belongs to none" in each for each in audit.warnings)
    assert any("there twice or more, such as " in warning and "1.png" in warning for warning in audit.warnings)
    assert any("accuracy will look better" in warning for warning in audit.warnings)
    assert any("under two labels" in warning for warning in audit.warnings)


@pytest.mark.parametrize("parts", [["train", "test"], ["train"], ["test"], []], ids=["both", "train", "test", "none"])
def test_a_class_without_images_is_told_once(parts: list[str], folder: Path) -> None:
    for part in ("train", "test"):
        (folder / part / "empty").mkdir()
        if part not in parts:
            shutil.copy(folder / part / "zebra" / "0.png", folder / part / "empty")
    problems = selfcon.data.check(folder)[0].problems
    where = folder / parts[0] if parts else ""
    assert problems == [f"{where} has no images of 'empty': fill the folder or remove it."] * bool(parts)


def test_images_on_which_there_is_nothing_to_see(folder: Path) -> None:
    place = folder / "train" / "zebra"
    for number, level in enumerate((0, 200)):
        Image.new("L", (32, 32), level).save(place / f"{number}.png")
    twelve_bits = np.random.default_rng(0).integers(0, 2**12, (32, 32)).astype(np.uint16)
    Image.fromarray(twelve_bits).save(place / "2.png")
    Image.fromarray(twelve_bits * 16).save(place / "3.png")
    audit, _ = selfcon.data.check(folder)
    assert audit.exit_code == 0
    flat, dark = audit.warnings
    assert flat == f"2 images are of one colour, such as {place / '0.png'}."
    assert dark.startswith(f"1 image is nearly black, such as {place / '2.png'}: files of 16 bits")


def test_the_contact_sheet(folder: Path, tmp_path: Path) -> None:
    (folder / "train" / "zebra" / "0.png").write_bytes(b"")
    sheet = selfcon.data.draw_contact_sheet(selfcon.data.load(folder), tmp_path / "new" / "sheet.png")
    pixels = np.asarray(Image.open(sheet))
    assert (pixels == (220, 20, 60)).all(2).sum() == 48 * 48  # the unreadable image is a red square
    assert (pixels < 100).any()  # names and pictures
    selfcon.data.draw_contact_sheet(selfcon.data.load(folder), sheet)  # an earlier sheet may be replaced
    precious = folder / "test" / "zebra" / "0.png"
    with pytest.raises(UsageError, match="is no contact sheet"):
        selfcon.data.draw_contact_sheet(selfcon.data.load(folder), precious)


def test_copies_between_any_two_splits_are_found(folder: Path) -> None:
    shutil.copytree(folder / "test", folder / "val")
    audit, _ = selfcon.data.check(folder)
    assert audit.duplicates["test in val"] == 9


@pytest.mark.parametrize("name", ["imagenette-small", "cub-small"])
def test_real_folders(real_data: Path, name: str, tmp_path: Path) -> None:
    audit, source = selfcon.data.check(real_data / name)
    assert audit.exit_code == 0
    assert audit.unreadable == []
    assert selfcon.data.draw_contact_sheet(source, tmp_path / "sheet.png").stat().st_size > 10_000


@pytest.mark.medium
def test_arrays_and_known_duplicates(cifar100: dict[str, Any], tmp_path: Path) -> None:
    cifar100 = {**cifar100, "x_test": np.concatenate([cifar100["x_test"][:-1], cifar100["x_train"][:1]])}
    np.savez(tmp_path / "x.npz", **cifar100)
    audit, _ = selfcon.data.check(tmp_path / "x.npz")
    assert audit.exit_code == 0
    assert audit.duplicates["test in train"] >= 1
