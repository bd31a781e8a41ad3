"""Files that make a program slow, large or obedient: refused quickly, with little memory, one sentence each."""

from __future__ import annotations

import http.server
import io
import json
import os
import shutil
import struct
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import selfcon
from selfcon.cli import main
from selfcon.data.archives import unpack
from selfcon.errors import UnsafeError
from selfcon.workflows.analysis_files import choose_folder
from tests.faults.test_hostile import Case, add, bytes_npz, folder_with, header, model, npz, raw_npz, void
from tests.workflows.conftest import write_stripes

SECONDS, GROWTH = 5, 400 << 20  # each; what Python, torch and a data set of a few images take is less


def many_scans() -> bytes:
    """A JPEG of nine megapixels whose last scan stands there four hundred times."""
    written = io.BytesIO()
    Image.new("L", (3000, 3000), 7).save(written, "JPEG", progressive=True)
    data = written.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * 400 + data[-2:]


def sparse(place: Path) -> None:
    folder_with(b"\x89PNG\r\n\x1a\n")(place)
    os.truncate(place / "train" / "a" / "bad.png", 3 << 30)


def long_header(place: Path) -> None:
    npz()(place)
    with zipfile.ZipFile(place.with_suffix(".npz"), "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("classes.npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 28) + b" " * (1 << 28))


def zeros_npz(place: Path) -> None:
    """A megabyte that would be three gigabytes of coloured images."""
    shape = (1000, 1000, 1000)
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".encode().ljust(117) + b"\n"
    with zipfile.ZipFile(place.with_suffix(".npz"), "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name in ("x_train", "x_test"):
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
                for _ in range(100):
                    member.write(b"\0" * (10 << 20))


def names_npz(kind: str, count: int) -> Make:
    return raw_npz("classes.npy", f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({count},)}}")


Make = Callable[[Path], None]


def pack_with(shape: list[int]) -> Make:
    metadata = {"format": "selfcon-pack-1", "name": "x", "classes": '["a", "b"]', "may_flip": "true"}

    def make(place: Path) -> None:
        facts = {"x_train": {"dtype": "U8", "shape": shape, "data_offsets": [0, 8]}}
        place.with_suffix(".npz").write_bytes(header(json.dumps({"__metadata__": metadata, **facts})) + b"\0" * 8)

    return make


def yaml(text: str) -> Make:
    return lambda place: void(place.with_suffix(".yaml").write_text(f"data: digits\n{text}"))


def with_weights(change: Callable[[Path], None]) -> Make:
    def make(place: Path) -> None:
        model()(place)
        change(place)

    return make


def break_weights(place: Path) -> None:
    weights = load_file(place / "model.safetensors")
    weights["encoder.conv1.weight"].view(-1)[5] = torch.nan
    save_file(weights, place / "model.safetensors")


def lead_outside(place: Path) -> None:
    (place / "model.safetensors").rename(place.parent / "secret")
    (place / "model.safetensors").symlink_to(place.parent / "secret")


def forget_hashes(place: Path) -> None:
    facts = json.loads((place / "model.json").read_text())
    (place / "model.json").write_text(json.dumps({**facts, "data_sha256": []}))


CHECK_FILE, CHECK = ["data", "check", "{place}.npz"], ["data", "check", "{place}"]
FIT, EVALUATE = ["fit", "--recipe", "{place}.yaml", "--out", "run"], ["evaluate", "{place}"]
CASES: list[tuple[list[str], *Case]] = [
    (CHECK, "a ppm of comments", 65, folder_with(b"P6\n" + b"#a\n" * 5_000_000 + b"1 1 255 abc", "bad.ppm")),
    (CHECK, "a long ppm of text", 65, folder_with(b"P3\n2400 2400 255\n" + b"0 " * (9 << 20), "bad.ppm")),
    (CHECK, "a long ppm of odd depth", 65, folder_with(b"P6\n2400 2400 254\n" + b"\0" * (17 << 20), "bad.ppm")),
    (CHECK, "a jpeg of many scans", 65, folder_with(many_scans(), "bad.jpg")),
    (CHECK, "a png of three gigabytes of nothing", 65, sparse),
    (CHECK_FILE, "names of no letters", 65, names_npz("<U0", 300_000_000)),
    (CHECK_FILE, "bytes of no letters", 65, names_npz("|S0", 300_000_000)),
    (CHECK_FILE, "an array's header of 256 megabytes", 77, long_header),
    (CHECK_FILE, "gigabytes of black", 77, zeros_npz),
    (CHECK_FILE, "millions of classes", 77, npz(classes=np.full(2_000_000, "x"))),
    (CHECK_FILE, "a class whose name is a book", 65, npz(classes=np.array(["a", "b" * 200_000]))),
    (CHECK_FILE, "a pack with a shape of huge numbers", 77, pack_with([int("9" * 4000)] * 2000)),
    (CHECK_FILE, "a pack with a long shape", 77, pack_with([1] * 9)),
    (CHECK_FILE, "a zip of nothing", 65, bytes_npz(b"PK\x05\x06" + b"\0" * 18)),
    (FIT, "a date that is none", 64, yaml("lr: 2001-99-99")),
    (FIT, "an integer that is none", 64, yaml("lr: !!int 'x'")),
    (FIT, "a number that is none", 64, yaml("lr: !!float 'x'")),
    (FIT, "a number of five thousand digits", 64, yaml(f"epochs: {'9' * 5000}")),
    (FIT, "a width beyond all bounds", 64, yaml("width: 1.0e+300")),
    (FIT, "data with a name too long", 66, yaml(f"data_root: x\ndata: {'d' * 300}".replace("data: digits\n", ""))),
    (FIT, "weights of a recipe", 77, yaml("model_options: {checkpoint_path: evil.pth}")),
    (FIT, "a configuration of a recipe", 77, yaml("model_options: {pretrained_cfg: {file: evil.pth}}")),
    (FIT, "a hundred million layers", 77, yaml("model_options: {layers: [100000000, 1, 1, 1]}")),
    (FIT, "a hundred thousand layers", 77, yaml("model_options: {layers: [99999, 1, 1, 1]}")),
    (EVALUATE, "a model of a hundred thousand layers", 77,
     model(name="densenet121", width=1.0, stem="large", options={"block_config": [99999, 1, 1, 1]})),
    (EVALUATE, "a model with a number deep inside", 77, model(options={"a": [{"b": [1, [10**30]]}]})),
    (EVALUATE, "weights that are no numbers", 65, with_weights(break_weights)),
    (EVALUATE, "weights of another folder", 77, with_weights(lead_outside)),
    (EVALUATE, "hashes that are no table", 65, with_weights(forget_hashes)),
]  # fmt: skip


@pytest.mark.parametrize(("command", "name", "code", "make"), CASES, ids=[case[1] for case in CASES])
def test_is_refused_quickly_and_with_little_memory(
    command: list[str],
    name: str,
    code: int,
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if command is EVALUATE:
        write_stripes(tmp_path / "stripes.npz")
    make(tmp_path / "bad")
    watched = Watched()
    begun = time.monotonic()
    with pytest.raises(SystemExit) as ended, watched:
        main([word.format(place=tmp_path / "bad") for word in command])
    said = "".join(capsys.readouterr())
    assert ended.value.code == code, said
    assert time.monotonic() - begun < 2 * SECONDS, "two cores may have more to do"
    assert watched.growth < GROWTH
    assert "bug of selfcon" not in said
    assert "Traceback" not in said


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class Watched:
    """How much more memory this process takes at the most, looked at every few milliseconds."""

    growth = 0

    def __enter__(self) -> None:
        self._done, self._before = threading.Event(), resident()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.wait(0.005):
            self.growth = max(self.growth, resident() - self._before)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def test_a_recipe_reaches_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Listener(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.chdir(tmp_path)
    with http.server.HTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/evil.pth"
        for options, code in (
            ({"pretrained": True, "pretrained_cfg": {"url": address}}, 64),
            ({"pretrained_cfg_overlay": {"url": address}}, 77),
        ):
            Path("bad.yaml").write_text(json.dumps({"data": "digits", "model_options": options}))
            with pytest.raises(SystemExit) as ended:
                main(["fit", "--recipe", "bad.yaml", "--out", "run"])
            assert ended.value.code == code
        server.shutdown()
    assert asked == []


def tar(**members: bytes) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        with tarfile.open(place / "x.tar", "w") as file:
            for name, data in members.items():
                add(file, name.rstrip("_").replace("_", "/"), data)
        return place / "x.tar"

    return make


def long_comment(place: Path) -> Path:
    with tarfile.open(place / "x.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as file:
        member = tarfile.TarInfo("x")
        member.pax_headers = {"comment": "x" * (200 << 20)}
        file.addfile(member)
    return place / "x.tar.gz"


def empty_members(place: Path) -> Path:
    with tarfile.open(place / "x.tar.gz", "w:gz", compresslevel=1) as file:
        for number in range(30_000):
            file.addfile(tarfile.TarInfo(f"{number}"))
    return place / "x.tar.gz"


ARCHIVES = {
    "a name twice": tar(a=b"one", a_=b"two"),
    "a file and a folder": tar(a=b"one", a_b=b"two"),
    "a folder and a file": tar(a_b=b"one", a=b"two"),
    "the folder itself": tar(**{".": b"one"}),
    "a comment of 200 megabytes": long_comment,
    "thousands of empty files": empty_members,
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_leaves_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    archive = ARCHIVES[name](tmp_path / "in")
    watched = Watched()
    with pytest.raises(UnsafeError), watched:
        unpack(archive, tmp_path / "target", most_bytes=100 << 20)
    assert list((tmp_path / "target").rglob("*")) == []
    assert watched.growth < GROWTH


def test_what_lies_outside_a_run_folder_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of a stranger's folder are neither read nor written through by the verbs that take one."""
    monkeypatch.chdir(tmp_path)
    write_stripes(tmp_path / "stripes.npz")
    place, secret = tmp_path / "bad", tmp_path / "secret"
    model()(place)
    secret.write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (place / "calibration.safetensors").symlink_to(secret)
    with pytest.raises(UnsafeError, match="leads out of its folder"):
        selfcon.export(place, formats=["hub"])
    (place / "calibration.safetensors").unlink()
    shutil.rmtree(place / "export")
    for name in ("analysis", "export"):
        (place / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeError, match="analysis is a link"):
        choose_folder([place], None)
    with pytest.raises(UnsafeError, match="export is a link"):
        selfcon.export(place)
    assert secret.read_text() == "mine"
    assert list((tmp_path / "elsewhere").iterdir()) == []
