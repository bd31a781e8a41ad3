"""`selfcon data` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.calling import call, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    root = tmp_path / "odd näme [x]"
    for split, count in (("train", 4), ("test", 2)):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number} [1].png")
    return root


def test_check_and_pack(folder: Path, tmp_path: Path) -> None:
    done = run("data", "check", folder, cwd=tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr
    assert "8 images, 4 of each class" in done.stdout
    assert len(list(tmp_path.glob("odd n*-sheet.png"))) == 1

    done = call("data", "pack", folder, "out.pack", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images"] == {"train": 8, "test": 4}
    done = call("data", "pack", folder, "out.pack", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == "selfcon: out.pack is already there: choose another name, or replace it with --overwrite.\n"

    done = call("data", "check", "out.pack", "--json", "--sheet", "x/sheet.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["ok"], result["sheet"]) == (True, "x/sheet.png")
    assert (tmp_path / "x" / "sheet.png").is_file()


def test_bad_data_is_65_with_the_file(folder: Path, tmp_path: Path) -> None:
    bad = folder / "train" / "cat" / "0 [1].png"
    bad.write_bytes(bad.read_bytes()[:60])
    done = call("data", "check", folder, cwd=tmp_path)
    assert done.returncode == 65
    assert f"{bad} cannot be read" in done.stdout
    assert "cannot be used as it is" in done.stdout
    done = call("data", "pack", folder, "out.pack", cwd=tmp_path)
    assert done.returncode == 65
    assert done.stderr.startswith(f"selfcon: {bad} cannot be read")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out.pack").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["data", "check", "digitz"], 64, "did you mean 'digits'"),
        (["data", "check", "no/such/place"], 66, "There is no file or folder no/such/place."),
        (["data", "check", "cifar10", "--data-root", "."], 66, "put cifar-10-batches-py there"),
        (["data", "chekc", "digits"], 64, "did you mean 'check'"),
        (["dta", "check", "digits"], 64, "did you mean 'data'"),
        (["--data", "digits"], 64, "A verb comes first"),
        (["data", "check", "digits", "--sheeet", "x.png"], 64, "did you mean '--sheet'"),
        (["data", "check", "digits", "--seed", "many"], 64, "argument --seed: wants a whole number from 0 on"),
        (["data", "pack", "digits"], 64, "the following arguments are required: out"),
        (["data", "pack", "digits", "x.pack", "--bad-images", "hide"], 64, "Unknown way to treat bad images 'hide'"),
        (["data", "pack", "digits", "/proc/nowhere/x.pack"], 74, "cannot be written"),
        (["data", "pack", "digits", "x.npz"], 64, "choose another ending"),
        (["data", "check", "digits", "--class-list", "x.txt"], 64, "goes with imagenet"),
        (["data"], 64, "is followed by check or pack"),
        (["data", "pack", "digits", "a.pack", "b.pack"], 64, "does not know what to do with 'b.pack'"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    done = call(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert done.stderr.startswith("selfcon: ")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_names_cannot_write_lines_of_their_own(folder: Path, tmp_path: Path) -> None:
    evil = folder / "train" / "cat" / "x\n\x1b[2Jselfcon: all fine.png"
    evil.write_text("")
    done = call("data", "check", folder, cwd=tmp_path)
    assert done.returncode == 65
    assert "\x1b" not in done.stdout
    assert "x\\n\\x1b[2Jselfcon: all fine.png is empty" in done.stdout
    done = call("data", "pack", folder, "x.pack", cwd=tmp_path)
    assert done.returncode == 65
    assert done.stderr.count("\n") == 1


def test_a_sheet_that_cannot_be_drawn_does_not_cost_the_result(folder: Path, tmp_path: Path) -> None:
    done = call("data", "check", folder, "--sheet", "/proc/x.png", cwd=tmp_path)
    assert done.returncode == 74
    assert "8 images, 4 of each class" in done.stdout


def test_a_bug_of_ours_is_a_sentence_too(tmp_path: Path) -> None:
    code = "import selfcon.data, selfcon.cli; selfcon.data.check = None; selfcon.cli.main(['data', 'check', 'digits'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 70
    assert done.stderr.startswith("selfcon: This is a bug of selfcon (TypeError")


def test_help_version_and_debug(tmp_path: Path) -> None:
    from selfcon import __version__

    assert call("--version", cwd=tmp_path).stdout.strip() == __version__
    for arguments in ([], ["--help"], ["data", "check", "--help"], ["data", "pack", "--help"]):
        done = call(*arguments, cwd=tmp_path)
        assert done.returncode == 0
        assert "usage: selfcon" in done.stdout
        assert len(done.stdout.splitlines()) < 32  # fits a screen
    assert "example: selfcon data check" in call("data", "check", "--help", cwd=tmp_path).stdout
    assert "Traceback" in run("data", "check", "digitz", "--debug", cwd=tmp_path).stderr


def test_tar_files(folder: Path, tmp_path: Path) -> None:
    packed = call("data", "pack", folder, "tars", "--shards", "3", "--json", cwd=tmp_path)
    said = json.loads(packed.stdout)
    assert (said["files"], said["images"]) == (5, {"train": 8, "test": 4})
    checked = call("data", "check", "tars", "--json", cwd=tmp_path)
    assert json.loads(checked.stdout)["images"] == {"train": 8, "test": 4}
    for wrong in (["tars", "--shards", "3"], ["new", "--shards", "0"], ["new", "--shards", "9", "--overwrite"]):
        assert call("data", "pack", folder, *wrong, cwd=tmp_path).returncode == 64
    one = call("data", "check", "tars/train-000000.tar", cwd=tmp_path)
    assert one.returncode == 64
    assert "name the folder" in one.stderr
