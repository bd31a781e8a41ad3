"""Memory that runs out, files that never answer, values that are no numbers, other machines: what must happen then."""

from __future__ import annotations

import hashlib
import http.server
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import selfcon.data
from selfcon.data import resident, scan
from selfcon.data.policies import POLICIES
from selfcon.workflows.reporting import write_report
from tests.browser.chrome import CHROMIUM, browse
from tests.cli.calling import call, run
from tests.workflows.conftest import write_stripes

SMALL = ["--data", "stripes.npz", "--width", "0.125", "--epochs", "2", "--batch-size", "32", "--device", "cpu"]
SMALL += ["--probe.epochs", "2", "--out", "run"]


def run_script(place: Path, script: str, *words: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    (place / "script.py").write_text(script)
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, "script.py", *words],
        cwd=place,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


_LITTLE_MEMORY = """
import resource, sys
import torch, selfcon.workflows.pipeline, selfcon.report.page, matplotlib.pyplot
from pathlib import Path
size = next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (1024 * size + (400 << 20),) * 2)
from selfcon.cli import main
main()
"""


def test_too_little_memory_says_what_would_fit(tmp_path: Path) -> None:
    write_stripes(tmp_path / "stripes.npz", train=2048, test=8, side=32)
    words = [
        "fit",
        "--data",
        "stripes.npz",
        "--width",
        "0.5",
        "--batch-size",
        "2048",
        "--device",
        "cpu",
        "--out",
        "run",
    ]
    done = run_script(tmp_path, _LITTLE_MEMORY, *words)
    assert done.returncode == 78, done.stderr
    assert "Batches of 2048 do not fit main memory" in done.stderr
    advised = re.search(r"--micro-batch (\d+) should fit", done.stderr)
    assert advised is not None, done.stderr
    assert 1 <= int(advised[1]) < 2048
    assert "The batch stays what it is" in done.stderr
    assert "Traceback" not in done.stderr


_HANGS = """
import sys, threading
from selfcon.data import scan, source
scan.PATIENCE = 2.0
read = source.read_image
source.read_image = lambda path: threading.Event().wait() if path.name == "3.png" else read(path)
from selfcon.cli import main
main()
"""


def test_a_file_that_never_answers_is_named(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for label in ("a", "b"):
            (tmp_path / "photos" / split / label).mkdir(parents=True)
            for number in range(6):
                pixels = np.full((9, 9, 3), 10 * number, np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / split / label / f"{number}.png")
    begun = time.monotonic()
    done = run_script(tmp_path, _HANGS, "fit", "--data", "photos", "--image-size", "8", "--out", "run")
    assert done.returncode == 70, done.stderr
    assert "Nothing came of photos/train/a/3.png in 2 seconds" in done.stderr
    assert time.monotonic() - begun < 60


def test_a_thread_that_fails_is_heard() -> None:
    def work(item: int) -> int:
        if item == 5:
            raise KeyError("gone")
        return item

    with pytest.raises(KeyError):
        list(scan.in_threads(work, range(20)))
    with pytest.raises(TimeoutError):  # of the work itself
        list(scan.in_threads(lambda _: (_ for _ in ()).throw(TimeoutError()), [1]))


def test_any_number_of_threads_gives_the_same_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stripes(tmp_path / "stripes.npz", train=40)
    selfcon.data.write_shards(selfcon.data.load(tmp_path / "stripes.npz"), tmp_path / "tars", 7)
    found = []
    for threads in (1, 4):
        monkeypatch.setattr(scan, "count_cores", lambda threads=threads: threads)
        data = resident.make_resident(selfcon.data.load(tmp_path / "tars").train, size=16)
        batches = data.batches(POLICIES["standard"], batch_size=8, seed=0, epoch=1, views=2, first=2)
        found.append(torch.cat([batch.images for batch in batches]))
    assert torch.equal(*found)


_BROKEN = """
import os, pathlib, sys
import torch
from selfcon.errors import NonFiniteError
from selfcon.training import trainer
update, rank = trainer.Trainer.update, os.environ["RANK"]
def weights_of(self):
    return [p.detach().clone() for p in self.stage.module.parameters()]
def broken(self, images, labels, step):
    before = weights_of(self)
    if step == 3 and rank == "1":
        images = images * float("nan")
    try:
        update(self, images, labels, step)
    except NonFiniteError:
        assert step == 3
        same = all(map(torch.equal, weights_of(self), before))
        pathlib.Path(f"stopped-{rank}").write_text("the same weights" if same else "other weights")
        raise
    assert not all(map(torch.equal, weights_of(self), before))
trainer.Trainer.update = broken
from selfcon.cli import main
main()
"""


@pytest.mark.parametrize(
    "more",
    [
        ["--method", "selfcon"],
        pytest.param(["--method", "ce"], marks=pytest.mark.slow),
        pytest.param(["--loss.ring", "true"], marks=pytest.mark.slow),
    ],
)
def test_a_value_that_is_no_number_in_one_process_ends_all(more: list[str], tmp_path: Path) -> None:
    write_stripes(tmp_path / "stripes.npz")
    done = run_script(tmp_path, _BROKEN, "fit", *SMALL, *more, processes=2)
    assert done.returncode == 1
    assert "exitcode  : 76" in done.stderr  # and the other one too, unless torchrun was quicker to end it
    assert "exitcode  : 70" not in done.stderr
    assert "at step 4 of" in done.stderr
    assert [(tmp_path / f"stopped-{rank}").read_text() for rank in (0, 1)] == ["the same weights"] * 2
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.slow
def test_deterministic_runs(tmp_path: Path) -> None:
    write_stripes(tmp_path / "stripes.npz")
    assert run("fit", *SMALL, "--deterministic", cwd=tmp_path).returncode == 0
    script = """
import torch
from selfcon.training import pretraining
def loss(self, images, labels):
    torch.use_deterministic_algorithms(True)
    raise RuntimeError("some_backward_cuda does not have a deterministic implementation, but you set ...")
pretraining.Pretraining.loss = loss
from selfcon.cli import main
main()
"""
    done = run_script(tmp_path, script, "fit", *SMALL[:-1], "other", "--deterministic")
    assert done.returncode == 64
    assert "--deterministic cannot be had here: some_backward_cuda does not have" in done.stderr


@pytest.mark.slow
def test_odd_places_and_locales(tmp_path: Path) -> None:
    place = tmp_path / "odd näme [x] (1)"
    place.mkdir()
    write_stripes(tmp_path / "stripes.npz")
    (place / "strïpes [1] {2}.npz").write_bytes((tmp_path / "stripes.npz").read_bytes())
    assert call("fit", *SMALL, cwd=tmp_path).returncode == 0
    plain = (tmp_path / "run" / "model.safetensors").read_bytes()
    words = ["strïpes [1] {2}.npz" if word == "stripes.npz" else word for word in SMALL[:-1]]
    for locale in ("C", "tr_TR.UTF-8"):
        odd = {"LC_ALL": locale, "LANG": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        done = run("fit", *words, f"rün [*] {locale}", cwd=place, **odd)
        assert done.returncode == 0, done.stderr
        assert (place / f"rün [*] {locale}" / "report.html").exists()
        assert (place / f"rün [*] {locale}" / "model.safetensors").read_bytes() == plain


class Server(http.server.BaseHTTPRequestHandler):
    archive: bytes = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.archive)))
        self.end_headers()
        self.wfile.write(self.archive[: len(self.archive) // 2] if "cut" in self.path else self.archive)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def served() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def archive_with(name: str) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        for each in ("cifar-10-batches-py/fine.txt", name):
            member = tarfile.TarInfo(each)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"data"))
    return written.getvalue()


def test_downloads(tmp_path: Path, served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    def download(url: str, md5: str | None) -> str:
        monkeypatch.setattr(datasets.CIFAR10, "url", url)
        monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", md5)
        with pytest.raises(selfcon.errors.UnsafeError) as refused:
            selfcon.data.load("cifar10", root=tmp_path, download=True)
        assert refused.value.exit_code == 77
        return str(refused.value)

    Server.archive = archive_with("cifar-10-batches-py/more.txt")
    good = hashlib.md5(Server.archive, usedforsecurity=False).hexdigest()
    assert "has not the hash" in download(f"{served}/x.tar.gz", "0" * 32)
    (tmp_path / "cifar-10-python.tar.gz").unlink()
    assert "has not the hash" in download(f"{served}/cut.tar.gz", good)
    assert "Nobody has told the hash" in download(f"{served}/x.tar.gz", None)
    Server.archive = archive_with("../evil.txt")
    evil = hashlib.md5(Server.archive, usedforsecurity=False).hexdigest()
    assert "written outside" in download(f"{served}/x.tar.gz", evil)
    assert {path.name for path in tmp_path.iterdir()} == {"cifar-10-python.tar.gz"}
    assert not (tmp_path.parent / "evil.txt").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_runs_no_script_of_a_name(tmp_path: Path) -> None:
    """Of classes and of runs, in the page of a run and in the page of several."""
    image = "\"><img src='http://127.0.0.1:9/beacon.png' onerror=\"document.title='ran'\">"
    evil = ["<script>document.title='ran'</script>", image, "a\n../../b", "d"]
    names = ['"><img src=beacon.png onerror="document.title=\'ran\'">', "<svg onload='document.title=`ran`'>\n..", "x"]
    write_stripes(tmp_path / "stripes.npz")
    arrays = dict(np.load(tmp_path / "stripes.npz"))
    np.savez(tmp_path / "stripes.npz", **{**arrays, "classes": np.array(evil)})
    runs = [tmp_path / "runs" / name for name in names]
    assert call("fit", *SMALL[:-1], runs[0], cwd=tmp_path).returncode == 0
    for other in runs[1:]:
        shutil.copytree(runs[0], other)
    several = write_report(runs, out=tmp_path / "several.html")
    assert {path.name for path in tmp_path.iterdir()} == {"stripes.npz", "runs", "several.html"}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == set(names)
    for report in (runs[0] / "report.html", several):
        with browse(tmp_path / "profile") as page:
            page.open(report.as_uri())
            page.run("new Promise(done => setTimeout(done, 500))")  # whatever comes late
            assert page.run("document.title") != "ran"
            assert page.run("document.querySelector('svg[onload], img[onerror], img[src*=beacon]') === null")
            shown = page.run("document.body.textContent")
            assert all(name in shown for name in (evil[0], image))
            assert report != several or all(name.splitlines()[0] in shown for name in names)
            assert [each for each in page.requests if not each.startswith("data:")] == [report.as_uri()]
            assert page.errors == []
