"""Claim: whatever stands in a file, its reader gives data or one of our errors: no crash, no hang, no growth.

Sound files (.npz, images, checkpoints, tar files, packed files, model folders) are damaged by hypothesis in many ways
and read. A JSON line for each kind: files read, how many were still sound, the longest time, and megabytes of growth.
    python benchmarks/fuzz.py [minutes]
"""

from __future__ import annotations

import io
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

import selfcon.data
from selfcon.data.images import decode
from selfcon.errors import SelfconError
from selfcon.networks.registry import create_model
from selfcon.training.artifact import load_model
from selfcon.training.checkpoint import Checkpoint, load_newest, save

_EDITS = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.binary(max_size=9), st.sampled_from(["over", "into", "cut", "zero"])),
    min_size=1,
    max_size=6,
)


def damage(data: bytes, edits: list[tuple[int, bytes, str]]) -> bytes:
    """The bytes with some of them written over, put in, cut off or made zero."""
    for place, piece, how in edits:
        at = place % (len(data) + 1)
        if how == "over":
            data = data[:at] + piece + data[at + len(piece) :]
        elif how == "into":
            data = data[:at] + piece + data[at:]
        elif how == "cut":
            data = data[:at]
        else:
            data = data[:at] + b"\0" * (8 * len(piece)) + data[at + 8 * len(piece) :]
    return data


@dataclass
class Reader:
    """How a kind of file is read, where it lies, and sound ones to begin with."""

    read: Callable[[], object]
    file: Path
    sound: list[bytes]
    files: int = 0
    unharmed: int = 0
    slowest: float = 0.0
    broken: list[str] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Damage and read for so long, once the sound ones are seen to be sound."""
        for data in self.sound:
            self.file.write_bytes(data)
            self.read()
        end = time.monotonic() + seconds

        @settings(
            max_examples=200,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.integers(0, len(self.sound) - 1), _EDITS)
        def once(which: int, edits: list[tuple[int, bytes, str]]) -> None:
            if time.monotonic() < end:
                self._try(damage(self.sound[which], edits))

        while time.monotonic() < end:
            once()

    def _try(self, data: bytes) -> None:
        self.file.write_bytes(data)
        self.files += 1
        begun = time.monotonic()
        try:
            self.read()
            self.unharmed += 1
        except SelfconError:
            pass
        except Exception as error:
            kept = Path(tempfile.gettempdir()) / f"fuzz-{len(self.broken)}-{self.file.name}"
            shutil.copy(self.file, kept)
            self.broken.append(f"{type(error).__name__}: {error} ({kept})")
        self.slowest = max(self.slowest, time.monotonic() - begun)


def picture(kind: str, mode: str = "RGB") -> bytes:
    written = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (12, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(written, kind)
    return written.getvalue()


def make_readers(place: Path) -> dict[str, Reader]:
    """One for each kind."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "x_train": rng.integers(0, 255, (6, 8, 8, 3), dtype=np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": rng.integers(0, 255, (3, 8, 8, 3), dtype=np.uint8),
        "y_test": np.array([0, 1, 2]),
        "classes": np.array(["a", "b", "c"]),
    }
    npz = place / "data.npz"
    np.savez(npz, **arrays)
    source = selfcon.data.load(npz)
    packed = selfcon.data.pack(source, place / "data.pack")
    tars = selfcon.data.write_shards(source, place / "tars", 10)
    state = save(place / "checkpoints", "step-000000001", Checkpoint({"x": torch.arange(6.0)}, {"epoch": 1}))
    model = place / "model"
    model.mkdir()
    net = create_model("resnet18", exits=[], stem="small", width=0.125, projection_dim=None, num_classes=3)
    save_file(net.state_dict(), model / "model.safetensors")
    network = {"name": "resnet18", "exits": "none", "stem": "small", "image_size": 16, "width": 0.125, "norm": "batch"}
    network |= {"projection_dim": None, "num_classes": 3, "options": {}}
    facts = {"format": 1, "network": network, "classes": ["a", "b", "c"], "method": "ce", "data": "x", "image_size": 16}
    (model / "model.json").write_text(json.dumps({**facts, "mean": [0.5] * 3, "std": [0.2] * 3}))
    image = place / "image"
    pictures = [picture(kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")] + [picture("PNG", "P")]

    def train_of(path: Path) -> object:
        train = selfcon.data.load(path).train
        return [train[index] for index in range(len(train))]

    def reader(read: Callable[[], object], file: Path) -> Reader:
        return Reader(read, file, [file.read_bytes()])

    def read_checkpoint() -> None:
        assert load_newest(state.parent) is not None, "it is not seen at all"

    return {
        "npz": reader(lambda: train_of(npz), npz),
        "image": Reader(lambda: decode(image, image.read_bytes()), image, pictures),
        "packed": reader(lambda: train_of(packed), packed),
        "tar": reader(lambda: train_of(tars), tars / "train-000000.tar"),
        "tar's facts": reader(lambda: train_of(tars), tars / "dataset.json"),
        "checkpoint": reader(read_checkpoint, state / "state.safetensors"),
        "checkpoint's facts": reader(read_checkpoint, state / "state.json"),
        "model": reader(lambda: load_model(model), model / "model.json"),
    }


def main() -> int:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    warnings.simplefilter("ignore")
    random.seed(0)
    broken = 0
    with tempfile.TemporaryDirectory() as folder:
        readers = make_readers(Path(folder))
        for name, reader in readers.items():
            sound = reader.file.read_bytes() if reader.file.exists() else None
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            reader.run(60 * minutes / len(readers))
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            row = {"benchmark": "fuzz", "kind": name, "files": reader.files, "still sound": reader.unharmed}
            row |= {"slowest_s": round(reader.slowest, 2), "grown_MB": round(grown), "broken": reader.broken[:5]}
            print(json.dumps(row), flush=True)
            broken += len(reader.broken) + (reader.slowest > 5) + (grown > 500)
            if sound is not None:
                reader.file.write_bytes(sound)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
