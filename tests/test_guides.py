"""What the guides show works as they show it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import selfcon
from selfcon.data.source import ArrayImages, Source
from selfcon.errors import UsageError
from selfcon.losses import Term
from tests.cli.calling import call

ROOT = Path(__file__).parents[1]
METHOD, LOSS, PROXIES, NETWORK, DATA, AUGMENTATION, ANALYSIS, LAST = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "guides" / "research.md").read_text(), flags=re.DOTALL
)


def run(place: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=place, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def use(place: Path, *words: str) -> str:
    done = call(*words, cwd=place)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def test_each_takes_less_than_thirty_lines() -> None:
    for block in (METHOD, LOSS, PROXIES, NETWORK, DATA, AUGMENTATION, ANALYSIS):
        assert len([line for line in block.splitlines() if line.strip()]) < 30


@pytest.mark.slow
def test_a_method_and_an_analysis_of_it(tmp_path: Path) -> None:
    (tmp_path / "method.py").write_text(METHOD)
    (tmp_path / "analysis.py").write_text(ANALYSIS)
    assert "top1" in run(tmp_path, "method.py")
    assert "% agree" in run(tmp_path, "analysis.py")


@pytest.mark.slow
def test_a_loss_is_what_its_run_began_with(tmp_path: Path) -> None:
    script = tmp_path / "loss.py"
    script.write_text(LOSS)
    first = run(tmp_path, "loss.py")
    assert "top1" in first
    assert run(tmp_path, "loss.py") == first
    script.write_text(LOSS.replace("margin=0.3", "margin=0.4").replace("amin(1)", "mean(1)"))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "The method triplet is not the one that runs/triplet began with (code, margin)" in done.stderr


@pytest.mark.slow
def test_proxies_are_learnt_and_known_again(tmp_path: Path) -> None:
    script = tmp_path / "proxies.py"
    script.write_text(PROXIES)
    first = run(tmp_path, "proxies.py")
    assert "top1" in first
    assert run(tmp_path, "proxies.py") == first
    script.write_text(PROXIES.replace("manual_seed(0)", "manual_seed(1)"))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "began with (proxies; what a script draws is the same again after torch.manual_seed(0))" in done.stderr


@pytest.mark.slow
def test_an_augmentation_is_what_its_run_began_with(tmp_path: Path) -> None:
    script = tmp_path / "augmentation.py"
    script.write_text(AUGMENTATION)
    first = run(tmp_path, "augmentation.py")
    assert "top1" in first
    assert run(tmp_path, "augmentation.py") == first
    script.write_text(AUGMENTATION.replace("hue=0.2", "hue=0.3").replace("[:, 0] < 0.5", "[:, 0] < 0.6"))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "The policy erasing is not the one that runs/erasing began with (hue, then)" in done.stderr
    alone = call("probe", "runs/erasing", "--out", "again", cwd=tmp_path)
    assert alone.returncode == 66
    assert "The policy erasing of runs/erasing was added by a script" in alone.stderr


@pytest.mark.slow
def test_a_network_and_a_data_set_with_all_verbs(tmp_path: Path) -> None:
    shown = DATA.split("if __name__")[0]
    (tmp_path / "mine.py").write_text(NETWORK + "\n\n" + shown + "\n\n" + LAST)
    small = ("--epochs", "2", "--batch-size", "50", "--probe.epochs", "2", "--device", "cpu")
    words = ("--model", "plain", "--exits", "2:fc,3:fc", "--data", "noise", "--out", "run", *small)
    assert "exit3" in run(tmp_path, "mine.py", "fit", *words)
    assert "exit3" in run(tmp_path, "mine.py", "evaluate", "run")
    (tmp_path / "data.py").write_text(DATA)
    assert "top1" in run(tmp_path, "data.py")


def test_names_that_are_taken() -> None:
    with pytest.raises(UsageError, match="a method 'selfcon' already"):
        selfcon.add_method(selfcon.Method(name="selfcon", paper="", uses_exits=True, terms=(Term("F", "F", "F"),)))
    with pytest.raises(UsageError, match="a data set 'digits' already"):
        selfcon.data.add_source("digits", lambda root: Source("x", ("a", "b"), *[_nothing()] * 2))


def test_a_data_set_that_is_added_again_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfcon.data.sources._ADDED", {})
    labels = np.arange(4) % 2
    for name in ("before", "after"):  # as a cell of a notebook does that is run again
        images = ArrayImages(np.zeros((4, 4, 4, 3), np.uint8), labels, name)
        selfcon.data.add_source("flat", partial(_make_source, images))
    assert selfcon.data.load("flat").train is images


def _make_source(images: ArrayImages, root: Path) -> Source:
    return Source("flat", ("a", "b"), images, images)


def _nothing() -> ArrayImages:
    return ArrayImages(np.zeros((0, 4, 4, 3), np.uint8), np.zeros(0, np.int64), "nothing")


def commands(page: str) -> list[list[str]]:
    """The commands of a page, word by word."""
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("selfcon ")]


def small(words: list[str]) -> list[str]:
    """The same command for little data; what is said last counts."""
    sizes = ("--width", "0.125", "--epochs", "1", "--batch-size", "16", "--device", "cpu")
    if words[0] in ("fit", "train"):
        image = () if "--recipe" in words else ("--image-size", "16")
        return [*words, *sizes, *image, *(("--probe.epochs", "1") if words[0] == "fit" else ())]
    if words[0] == "doctor":
        return [*words, *sizes, "--image-size", "16"]
    return [*words, "--device", "cpu"] if words[0] in ("calibrate", "predict") else words


@pytest.mark.slow
def test_the_commands_for_own_images_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for place in ("birds/train/owl", "birds/train/wren", "birds/test/owl", "birds/test/wren", "holiday"):
        (tmp_path / place).mkdir(parents=True)
        for number in range(30 if "train" in place else 8):
            pixels = rng.integers(0, 150, (24, 30, 3)) + 90 * ("owl" in place)
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / place / f"{number}.png")
    found = commands("guides/own-images.md")
    assert [words[0] for words in found] == [
        *("data", "doctor", "fit", "train", "train", "report", "calibrate", "report", "predict", "export", "serve"),
    ]
    for words in found[:-1]:  # what serves does not end
        more = ["--overwrite"] if words[0] == "train" and words[-1] == "runs/birds" else []
        use(tmp_path, *small(words), *more)
    assert (tmp_path / "compare.html").is_file()


@pytest.mark.slow
def test_the_commands_for_comparing_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (80, 32, 32, 3), dtype=np.uint8), np.arange(80) % 4
    np.savez(tmp_path / "cifar100.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    found = commands("guides/research.md")
    assert [words[0] for words in found] == ["recipes", "fit", "fit", "report", "reproduce"]
    for words in found[:-1]:
        use(tmp_path, *small(words))
    # The plan of a whole table takes minutes on a CPU: one of its rows.
    only = [word for name in ("method=selfcon", "model=resnet18", "data=cifar100") for word in ("--only", name)]
    assert "1 run, about" in use(tmp_path, *found[-1], *only)
