from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


def write_stripes(path: Path, *, train: int = 96, test: int = 36, side: int = 16) -> Path:
    """Images of four classes that a small network tells apart in no time: stripes, coarse or fine, across or down."""
    rng = np.random.default_rng(0)

    def draw(count: int) -> tuple[Any, Any]:
        labels = np.arange(count) % 4
        waves = np.sin(np.arange(side)[None] * np.where(labels % 2, 0.6, 1.6)[:, None] + rng.uniform(0, 6, (count, 1)))
        rows = np.repeat(waves[:, :, None], side, axis=2)
        images = np.where((labels < 2)[:, None, None], rows, rows.transpose(0, 2, 1))
        noisy = 128 + 90 * images[..., None] + rng.normal(0, 12, (count, side, side, 3))
        return noisy.clip(0, 255).astype(np.uint8), labels

    x_train, y_train = draw(train)
    x_test, y_test = draw(test)
    classes = np.array(["rows", "wide rows", "columns", "<b>wide</b> & 'co$lumn$s'"])
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, classes=classes)
    return path


def write_noise(folder: Path, *, images: int = 30) -> None:
    """A folder of two classes that nobody can tell apart, not yet split."""
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
        for number in range(images):
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / name / f"{number}.png")


@pytest.fixture(scope="session")
def stripes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stripes(tmp_path_factory.mktemp("data") / "stripes.npz")
