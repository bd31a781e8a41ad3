"""Images for tests: patches of the two photographs that scikit-learn carries, and CIFAR-100 where it is at hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images


@pytest.fixture(scope="session")
def photographs() -> list[Any]:
    return list(load_sample_images().images)  # [427, 640, 3] uint8 each


@pytest.fixture(scope="session")
def patches(photographs: list[Any]) -> Any:
    """2,000 different pieces of photographs, [N, 32, 32, 3]."""
    rng = np.random.default_rng(0)
    pieces = []
    for photograph in photographs:
        for _ in range(1000):
            side = int(rng.integers(32, 128))
            top, left = rng.integers(0, 427 - side), rng.integers(0, 640 - side)
            piece = Image.fromarray(photograph[top : top + side, left : left + side]).resize((32, 32))
            pieces.append(np.asarray(piece))
    return np.stack(pieces)


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = os.environ.get("SELFCON_TEST_DATA")
    if not folder:
        pytest.skip("SELFCON_TEST_DATA does not name a folder with real images")
    return Path(folder)


@pytest.fixture(scope="session")
def cifar100(real_data: Path) -> dict[str, Any]:
    """5,000 training and 1,000 test images of CIFAR-100, sorted by class."""
    arrays: dict[str, Any] = {}
    labels = np.load(next((real_data / "cifar100").rglob("labels.npz")))
    for split, step in (("train", 10), ("test", 10)):
        paths = sorted((real_data / "cifar100").rglob(f"{split}-*.webp"), key=lambda path: path.name)
        strips = [np.asarray(Image.open(path).convert("RGB")).reshape(-1, 32, 32, 3)[::step] for path in paths]
        arrays[f"x_{split}"] = np.concatenate(strips)
        arrays[f"y_{split}"] = labels[f"y_{split}"][::step].astype(np.int64)
    arrays["classes"] = labels["classes"]
    return arrays


@pytest.fixture
def folder(tmp_path: Path, patches: Any) -> Path:
    """Three classes in train (6 images each) and test (3 each), as PNG; the root's name is awkward on purpose."""
    root = tmp_path / "my data [v2] ünï"
    for split, count in (("train", 6), ("test", 3)):
        for label, name in enumerate(("a b", "ç[1]", "zebra")):
            place = root / split / name
            place.mkdir(parents=True)
            for number in range(count):
                row = label * 100 + number + (50 if split == "test" else 0)
                Image.fromarray(patches[row]).save(place / f"{number}.png")
    return root
