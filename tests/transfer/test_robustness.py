"""Corruptions that can be repeated, and errors by the book."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from selfcon.errors import UsageError
from selfcon.transfer.robustness import ALEXNET, CORRUPTIONS, corrupt, corrupt_all, mean_corruption_error

pytest.importorskip("imagecorruptions")


def image(side: int = 48) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    ramp = np.linspace(40, 210, side).astype(np.uint8)
    across = np.tile(ramp, (side, 1))
    return np.stack([across, across.T, np.full((side, side), 90, np.uint8)], axis=2)


@pytest.mark.medium
@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_every_corruption_changes_the_image_the_same_way_each_time(corruption: str) -> None:
    clean = image()
    np.random.seed(3)  # noqa: NPY002
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    one, again = (corrupt(clean, corruption, 3, seed=5) for _ in range(2))
    assert np.array_equal(one, again)
    assert one.shape == clean.shape
    assert one.dtype == np.uint8
    assert not np.array_equal(one, clean)
    assert np.random.random() == expected  # noqa: NPY002 - nobody else's numbers change
    change = [np.abs(corrupt(clean, corruption, severity, seed=5).astype(int) - clean).mean() for severity in (1, 5)]
    assert change[1] > change[0]


@pytest.mark.medium
def test_processes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.stack([image()] * 6)
    alone = corrupt_all(images, "shot_noise", 2, seed=1, workers=1)
    assert not np.array_equal(alone[0], alone[1])  # each has a seed of its own
    monkeypatch.setattr("selfcon.transfer.robustness._WORTH_PROCESSES", 1)
    assert np.array_equal(corrupt_all(images, "shot_noise", 2, seed=1, workers=2), alone)


@pytest.mark.slow
def test_a_plain_script_is_not_stopped_by_its_processes(tmp_path: Path) -> None:
    script = """
        import numpy as np
        from selfcon.transfer import robustness

        robustness._WORTH_PROCESSES = 1
        for severity in (1, 2):
            print(robustness.corrupt_all(np.zeros((3, 32, 32, 3), np.uint8), "fog", severity, seed=0, workers=2).shape)
    """
    (tmp_path / "plain.py").write_text(textwrap.dedent(script))
    done = subprocess.run([sys.executable, "plain.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(3, 32, 32, 3)\n" * 2
    assert done.stderr.count("note: images are corrupted in this process alone") == 1


def test_mean_corruption_error_by_hand() -> None:
    errors = {"fog": [40.0, 60.0], "snow": [20.0, 30.0]}
    plain = mean_corruption_error(errors, 10.0, imagenet=False)
    assert plain == {"mean_error": pytest.approx(37.5), "relative_error": pytest.approx(27.5)}
    found = mean_corruption_error(errors, 10.0, imagenet=True)
    assert found["mce"] == pytest.approx(100 * (50 / 81.9324 + 25 / 86.6816) / 2)
    assert found["relative_mce"] == pytest.approx(100 * (40 / (81.9324 - 43.48) + 15 / (86.6816 - 43.48)) / 2)
    alexnet = mean_corruption_error({name: [error] * 5 for name, error in ALEXNET.items()}, 43.48, imagenet=True)
    assert alexnet == {"mce": pytest.approx(100.0), "relative_mce": pytest.approx(100.0)}


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="fog"):
        corrupt(image(), "fogg", 1, seed=0)
    with pytest.raises(UsageError, match="1 to 5"):
        corrupt(image(), "fog", 6, seed=0)
    with pytest.raises(UsageError, match="at least 32 pixels"):
        corrupt(image(16), "fog", 1, seed=0)
