"""Files built to do harm, as a user would meet them: no code runs, nothing is written elsewhere, one sentence each."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from selfcon.cli import main
from selfcon.data import load as load_data
from selfcon.data.archives import unpack
from selfcon.errors import SelfconError, UnsafeError
from selfcon.networks.registry import create_model
from selfcon.networks.weights import read_weights
from selfcon.training.artifact import load_model
from selfcon.workflows.settings import collect_settings
from tests.workflows.conftest import write_stripes

CANARY = "canary"
Make = Callable[[Path], None]
Case = tuple[str, int, Make]


class Bomb:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return exec, (f"open({str(Path(os.environ['CANARY_FOLDER']) / CANARY)!r}, 'w').close()",)


def png(side: int = 8) -> bytes:
    written = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), 7, np.uint8)).save(written, "PNG")
    return written.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, data: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def folder_with(data: bytes, name: str = "bad.png") -> Make:
    """A folder of images, one of which is these bytes."""

    def make(place: Path) -> None:
        for split in ("train", "test"):
            for label in ("a", "b"):
                (place / split / label).mkdir(parents=True)
                for number in range(2):
                    (place / split / label / f"{number}.png").write_bytes(png())
        (place / "train" / "a" / name).write_bytes(data)

    return make


def jpeg() -> bytes:
    written = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(written, "JPEG")
    return written.getvalue()


IMAGES: list[Case] = [
    ("empty", 65, folder_with(b"")),
    ("text as an image", 65, folder_with(b"<html><script>alert(1)</script>")),
    ("half a jpeg", 65, folder_with(jpeg()[:500], "bad.jpg")),
    ("half a png", 65, folder_with(png()[:40])),
    ("a png of 400 megapixels", 65, folder_with(png_of(20_000, 20_000, b"\0" * 1000))),
    ("a png that claims 2^31 pixels a side", 65, folder_with(png_of(2**31 - 1, 2**31 - 1, b""))),
    ("an svg", 65, folder_with(b'<svg xmlns="http://www.w3.org/2000/svg"><script>1</script></svg>')),
    ("an eps that wants ghostscript", 65, folder_with(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "x.png")),
    (
        "a tiff with a looping directory",
        65,
        folder_with(b"II*\0\x08\0\0\0\x01\0\0\x01\x03\0\x01\0\0\0\x01\0\0\0\x08\0\0\0", "x.tif"),
    ),
    (
        "a bmp of minus a size",
        65,
        folder_with(b"BM" + struct.pack("<IHHIIiiHH", 54, 0, 0, 54, 40, -5, 1 << 30, 1, 24), "x.bmp"),
    ),
    ("a gif without frames", 65, folder_with(b"GIF89a\xff\xff\xff\xff\x00\x00\x00;", "x.gif")),
]


def npz(**arrays: Any) -> Make:
    def make(place: Path) -> None:
        good = {
            "x_train": np.zeros((4, 8, 8, 3), np.uint8),
            "y_train": np.array([0, 1, 0, 1]),
            "x_test": np.zeros((2, 8, 8, 3), np.uint8),
            "y_test": np.array([0, 1]),
        }
        np.savez(place.with_suffix(".npz"), **{**good, **arrays})

    return make


def raw_npz(name: str, header: str, body: bytes = b"") -> Make:
    def make(place: Path) -> None:
        npz()(place)
        text = header.encode().ljust(117) + b"\n"
        with zipfile.ZipFile(place.with_suffix(".npz"), "a") as file:
            file.writestr(name, b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body)

    return make


def bomb_npz(place: Path) -> None:
    npz()(place)
    with (
        zipfile.ZipFile(place.with_suffix(".npz"), "a", zipfile.ZIP_DEFLATED) as file,
        file.open("classes.npy", "w", force_zip64=True) as member,
    ):
        for _ in range(1100):
            member.write(b"\0" * (1 << 20))


def bytes_npz(data: bytes) -> Make:
    return lambda place: void(place.with_suffix(".npz").write_bytes(data))


def void(_: Any) -> None:
    pass


def object_npz(place: Path) -> None:
    np.savez(place.with_suffix(".npz"), x_train=np.array([Bomb()], dtype=object), y_train=[0], x_test=[0], y_test=[0])


def array_header(shape: str) -> Make:
    return raw_npz("classes.npy", f"{{'descr': '<U9', 'fortran_order': False, 'shape': {shape}}}")


ARRAYS: list[Case] = [
    ("objects in an npz", 77, object_npz),
    ("an npz that unpacks to a gigabyte", 77, bomb_npz),
    ("an npz with a shape beyond its data", 65, array_header("(9999999999,)")),
    ("an npz with code in its header", 65, array_header("__import__('os').system('touch canary')")),
    ("an npz of negative shape", 65, array_header("(-1,)")),
    ("a text as npz", 65, bytes_npz(b"PK\x03\x04 not really")),
    ("a label beyond the classes", 65, npz(y_test=np.array([0, 9]))),
    ("labels that are no numbers", 65, npz(y_train=np.array(["a", "b", "a", "b"]))),
    ("images that are no bytes", 65, npz(x_train=np.zeros((4, 8, 8, 3)))),
    ("a label of 2^62", 65, npz(y_train=np.array([0, 1, 0, 2**62]))),
]


def shards(change: Callable[[tarfile.TarFile], None] | bytes) -> Make:
    def make(place: Path) -> None:
        place.mkdir()
        for split in ("train", "test"):
            with tarfile.open(place / f"{split}-000000.tar", "w") as tar:
                for index in range(4):
                    add(tar, f"{index}.png", png())
                    add(tar, f"{index}.cls", str(index % 2).encode())
                if split == "train" and callable(change):
                    change(tar)
        if isinstance(change, bytes):
            (place / "train-000000.tar").write_bytes(change)

    return make


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", **facts: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in facts.items():
        setattr(member, key, value)
    tar.addfile(member, io.BytesIO(data))


def labelled(label: bytes) -> Callable[[tarfile.TarFile], None]:
    def change(tar: tarfile.TarFile) -> None:
        add(tar, "9.png", png())
        add(tar, "9.cls", label)

    return change


SHARDS: list[Case] = [
    ("a tar without bytes", 65, shards(b"")),
    ("a tar of noise", 65, shards(np.random.default_rng(0).bytes(5000))),
    ("a label of a megabyte", 65, shards(labelled(b"1" * (1 << 20)))),
    ("a label with code", 65, shards(labelled(b"__import__('os')"))),
    ("a negative label", 65, shards(labelled(b"-1"))),
    ("a size beyond the file", 65, shards(tarfile.TarInfo("8.png").tobuf() + b"\0" * 512)),
]

YAML: list[Case] = [
    (name, 64, lambda place, text=text: void(place.with_suffix(".yaml").write_text(text)))  # type: ignore[misc]
    for name, text in {
        "a python object": f"data: !!python/object/apply:os.system ['touch {CANARY}']",
        "a python name": "data: !!python/name:os.system ''",
        "aliases that grow": "a: &a [x, x]\nb: &b [*a, *a]\nmodel_options: {c: [*b, *b]}",
        "a deep nest": "model_options: " + "[" * 5000 + "]" * 5000,
        "no settings": "- 1\n- 2",
        "nothing of text": "\x00\x01",
        "an infinite rate": "data: digits\nlr: .inf",
        "a rate that is no number": "data: digits\nlr: .nan",
        "a key twice as wide": "data: digits\nwidht: 2",
    }.items()
]


def model(**changes: Any) -> Make:
    def make(place: Path) -> None:
        net = create_model("resnet18", exits=[], stem="small", width=0.125, projection_dim=None, num_classes=4)
        place.mkdir()
        save_file(net.state_dict(), place / "model.safetensors")
        network = {
            "name": "resnet18", "exits": "none", "stem": "small", "image_size": 16, "width": 0.125, "norm": "batch",
            "projection_dim": None, "num_classes": 4, "options": {},
        }  # fmt: skip
        facts = {
            "format": 1, "network": {**network, **changes}, "classes": ["a", "b", "c", "d"], "method": "ce",
            "data": str(place.parent / "stripes.npz"), "image_size": 16, "mean": [0.5] * 3, "std": [0.2] * 3,
            "data_sha256": {},
        }  # fmt: skip
        (place / "model.json").write_text(json.dumps(facts))
        (place / "config.yaml").write_text(f"data: {place.parent / 'stripes.npz'}\n")

    return make


def model_with(name: str, data: bytes) -> Make:
    def make(place: Path) -> None:
        model()(place)
        (place / name).write_bytes(data)

    return make


def header(text: str, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text.encode()


def tensors(**places: tuple[list[int], list[int]]) -> bytes:
    facts = {name: {"dtype": "F32", "shape": shape, "data_offsets": at} for name, (shape, at) in places.items()}
    return header(json.dumps(facts)) + b"\0" * 12


MODELS: list[Case] = [
    ("weights from elsewhere", 77, model(options={"checkpoint_path": "/etc/passwd"})),
    ("a configuration from elsewhere", 77, model(options={"pretrained_cfg": {"url": "http://localhost:9/x.pth"}})),
    ("a model from a hub", 65, model(name="hf-hub:someone/evil")),
    ("a model from a folder", 65, model(name="local-dir:/etc")),
    ("a width of a billion", 77, model(width=1e9)),
    ("a billion layers", 77, model(options={"layers": [10**9, 1, 1, 1]})),
    ("an image of a million pixels a side", 77, model(image_size=10**6)),
    ("a width that is no number", 77, model(width=float("nan"))),
    ("options that are no options", 65, model(options={"block": "os.system"})),
    ("exits that are code", 65, model(exits="__import__('os').system('touch canary')")),
    ("another network's weights", 65, model(num_classes=5)),
    ("a deep nest of json", 65, model_with("model.json", b"[" * 100_000)),
    ("a list of facts", 65, model_with("model.json", b"[1, 2]")),
    ("a pickle for weights", 65, model_with("model.safetensors", pickle.dumps({"x": 1}))),
    ("a header longer than the file", 65, model_with("model.safetensors", header("{}", 1 << 60))),
    ("tensors that overlap", 65, model_with("model.safetensors", tensors(a=([2], [0, 8]), b=([2], [4, 12])))),
    ("a tensor of 2^60 numbers", 65, model_with("model.safetensors", tensors(a=([1 << 60], [0, 8])))),
    ("a header of nothing", 65, model_with("model.safetensors", b"")),
]  # fmt: skip

COMMANDS = {
    "images": (IMAGES, ["data", "check", "{place}"]),
    "arrays": (ARRAYS, ["data", "check", "{place}.npz"]),
    "shards": (SHARDS, ["data", "check", "{place}"]),
    "yaml": (YAML, ["fit", "--recipe", "{place}.yaml", "--out", "run"]),
    "models": (MODELS, ["evaluate", "{place}"]),
}
CASES = [(command, *case) for cases, command in COMMANDS.values() for case in cases]
READERS: dict[str, Callable[[Path], Any]] = {
    "data": load_data,
    "fit": lambda path: collect_settings(str(path), {}),
    "evaluate": load_model,
}
"""What reads the files of each verb."""


def test_there_are_enough_of_them() -> None:
    assert len(CASES) + len(ARCHIVES) + 6 >= 60


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CANARY_FOLDER", str(tmp_path))


@pytest.mark.parametrize(("command", "name", "code", "make"), CASES, ids=[case[1] for case in CASES])
def test_a_hostile_file(
    command: list[str], name: str, code: int, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if command[0] == "evaluate":
        write_stripes(tmp_path / "stripes.npz")
    make(tmp_path / "bad")
    before = set(tmp_path.rglob("*"))
    begun = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main([word.format(place=tmp_path / "bad") for word in command])
    assert time.monotonic() - begun < 20
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert ended.value.code == code, said
    assert "Traceback" not in said
    assert "bug of selfcon" not in said
    assert set(tmp_path.rglob("*")) - {tmp_path / "bad-sheet.png"} == before
    if not (tmp_path / "bad" / "train").exists():  # images are read one by one
        path = Path(next(word for word in command if "{place}" in word).format(place=tmp_path / "bad"))
        begun = time.monotonic()
        with pytest.raises(SelfconError) as refused:
            READERS[command[0]](path)
        assert time.monotonic() - begun < 1
        assert refused.value.exit_code == code
    assert not Path(CANARY).exists()


def tar_with(**facts: Any) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        with tarfile.open(place / "x.tar", "w") as tar:
            add(tar, "good.txt", b"fine")
            add(tar, **{"data": b"evil" if facts.get("type", tarfile.REGTYPE) == tarfile.REGTYPE else b"", **facts})
        return place / "x.tar"

    return make


def two_steps(place: Path) -> Path:
    """A link to outside, and a file through it."""
    with tarfile.open(place / "x.tar", "w") as tar:
        add(tar, "door", type=tarfile.SYMTYPE, linkname="..")
        add(tar, "door/evil.txt", b"evil")
    return place / "x.tar"


def bomb(place: Path) -> Path:
    with gzip.open(place / "x.tar.gz", "wb") as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        member = tarfile.TarInfo("zeros")
        member.size = 300 << 20
        tar.addfile(member, Zeros())
    return place / "x.tar.gz"


class Zeros(io.RawIOBase):
    def read(self, size: int = -1) -> bytes:
        return b"\0" * size


def zip_with(name: str, mode: int = 0) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        with zipfile.ZipFile(place / "x.zip", "w") as file:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            file.writestr(info, "/etc/passwd")
        return place / "x.zip"

    return make


ARCHIVES: dict[str, Callable[[Path], Path]] = {
    "a way up": tar_with(name="../evil.txt"),
    "a way up in the middle": tar_with(name="a/../../evil.txt"),
    "an absolute name": tar_with(name="/tmp/selfcon-evil.txt"),
    "a link": tar_with(name="x", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": tar_with(name="x", type=tarfile.LNKTYPE, linkname="../../secret"),
    "a device": tar_with(name="x", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
    "a pipe": tar_with(name="x", type=tarfile.FIFOTYPE),
    "a link and a file through it": two_steps,
    "a bomb": bomb,
    "a zip with a way up": zip_with("../evil.txt"),
    "a zip with a way up for Windows": zip_with("..\\evil.txt"),
    "a zip with a drive": zip_with("C:/evil.txt"),
    "a zip with a link": zip_with("x", 0o120777),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_hostile_archive(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    archive, target = ARCHIVES[name](tmp_path / "in"), tmp_path / "deep" / "target"
    with pytest.raises(UnsafeError):
        unpack(archive, target, most_bytes=100 << 20)
    assert list(target.rglob("*")) == []
    assert {path.name for path in tmp_path.iterdir()} == {"in", "deep"}
    assert not Path("/tmp/selfcon-evil.txt").exists()


def test_a_good_archive(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as tar:
        add(tar, "folder", type=tarfile.DIRTYPE)
        add(tar, "folder/a.txt", b"one")
    (tmp_path / "to" / "folder").mkdir(parents=True)
    (tmp_path / "to" / "folder" / "b.txt").write_text("mine")
    unpack(tmp_path / "x.tgz", tmp_path / "to")
    assert (tmp_path / "to" / "folder" / "a.txt").read_text() == "one"
    assert (tmp_path / "to" / "folder" / "b.txt").read_text() == "mine"
    (tmp_path / "y.tgz").write_bytes((tmp_path / "x.tgz").read_bytes()[:60])
    with pytest.raises(SelfconError, match="cannot be unpacked"):
        unpack(tmp_path / "y.tgz", tmp_path / "to2")


def test_weights_of_strangers(tmp_path: Path) -> None:
    evil, good, bomb_ = tmp_path / "evil.pth", tmp_path / "good.pth", tmp_path / "bomb.pth"
    evil.write_bytes(pickle.dumps({"state_dict": Bomb()}))
    torch.save({"state_dict": {"module.conv1.weight": torch.ones(2)}, "epoch": 3}, good)
    with zipfile.ZipFile(bomb_, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", b"\0" * (64 << 20))
    for path in (evil, good):
        with pytest.raises(UnsafeError, match="say --trust"):
            read_weights(path)
    begun = time.monotonic()
    for path in (evil, bomb_):
        with pytest.raises(UnsafeError):
            read_weights(path, trust=True)
    assert time.monotonic() - begun < 1
    assert not (tmp_path / CANARY).exists()
    assert list(read_weights(good, trust=True)) == ["module.conv1.weight"]
    torch.save({"model": {"x": torch.ones(1)}, "path": Path("x")}, tmp_path / "more.pth")
    with pytest.raises(UnsafeError, match=r"more than weights \(pathlib.*save its state_dict alone"):
        read_weights(tmp_path / "more.pth", trust=True)
    for data in (header("{}", 1 << 60), tensors(a=([1 << 60], [0, 8])), tensors(a=([2], [0, 8]), b=([2], [4, 12]))):
        (tmp_path / "x.safetensors").write_bytes(data)
        begun = time.monotonic()
        with pytest.raises(SelfconError):
            read_weights(tmp_path / "x.safetensors")
        assert time.monotonic() - begun < 1
    good.write_bytes(good.read_bytes()[:100])
    with pytest.raises(SelfconError):
        read_weights(good, trust=True)
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--data", "digits", "--weights", str(evil), "--out", "run"])
    assert ended.value.code == 77
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_damaged_files_of_every_kind(tmp_path: Path) -> None:
    """benchmarks/fuzz.py for a few seconds; ten minutes of it are run by hand."""
    script = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), "0.2"], env=environment, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 8
    for row in rows:
        assert row["still sound"] < row["files"] / 2, "damage is not seen"
