"""`make setup`: every problem is one sentence, and an incomplete environment never counts as ready."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "setup_env.py"
UV = Path(sys.executable).parent / "uv"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load the script, with an empty directory as the project."""
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["setup_env.py"])
    (tmp_path / "requirements.lock").write_text("tiny==1.0 \\\n    --hash=sha256:" + "0" * 64 + "\n")
    return module


def setup(script: Any, match: str) -> None:
    """Run the script and expect one sentence and no environment that is marked as complete."""
    with pytest.raises(SystemExit, match=match) as stopped:
        script.main()
    assert "\n" not in str(stopped.value)
    assert not Path(".venv/.ready").exists()


def write_wheel(directory: Path) -> str:
    """Write an installable wheel of a package `tiny` and return its SHA-256."""
    path = directory / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the real uv first on PATH, with a cache and an index of its own."""
    if not UV.exists():
        pytest.skip("uv is not installed next to Python")
    monkeypatch.setenv("PATH", f"{UV.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    for name in ("UV_FIND_LINKS", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def test_python_too_old(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    setup(script, r"selfcon needs Python 3\.11 or newer.*PYTHON=python3\.12")


def test_disk_too_small(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3.2e9))
    setup(script, r"needs about 8 GB, but .* has 3\.2 GB free")


def test_neither_uv_nor_pip(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python3"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(bare))
    setup(script, "cannot create an environment. Install uv, or pip and venv")


@pytest.mark.medium
def test_wrong_hash(script: Any, uv: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(tmp_path)
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    setup(script, r"tiny==1\.0 does not match its hash in requirements\.lock.*git checkout requirements\.lock")
    Path("requirements.lock").write_text("tiny==1.0\n")
    setup(script, r"tiny==1\.0 does not match its hash")


@pytest.mark.medium
def test_proxy_that_refuses(script: Any, uv: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    setup(script, "cannot be downloaded through the proxy that HTTPS_PROXY names. Check the connection")


@pytest.mark.medium
def test_disk_full_while_installing(script: Any, uv: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full" / "uv"
    full.parent.mkdir()
    failure = "error: failed to write: No space left on device (os error 28)"
    full.write_text(f'#!/bin/sh\nif [ "$1" = pip ]; then echo "{failure}"; exit 2; fi\nexec {UV} "$@"\n')
    full.chmod(0o755)
    monkeypatch.setenv("PATH", f"{full.parent}{os.pathsep}{os.environ['PATH']}")
    setup(script, "The disk is full. Free about 8 GB")


@pytest.mark.medium
def test_ready_only_when_complete(script: Any, uv: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = write_wheel(tmp_path)
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    Path("requirements.lock").write_text(f"tiny==1.0 --hash=sha256:{sha256}\n")
    with pytest.raises(SystemExit, match="failed with exit code"):  # this directory holds no project to install
        script.main()
    assert subprocess.run([".venv/bin/python", "-c", "import tiny"], check=False).returncode == 0
    assert not Path(".venv/.ready").exists()

    monkeypatch.setattr(script, "install", lambda venv, lock: None)
    script.main()
    assert Path(".venv/.ready").exists()
    monkeypatch.setattr(script, "install", lambda venv, lock: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit):
        script.main()
    assert not Path(".venv/.ready").exists()


def test_pip_when_uv_cannot_be_installed(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[object], lock: str) -> None:
        commands.append([str(word) for word in command])
        if "--quiet" in command and "--require-hashes" in command:
            raise script.InstallError("no wheel of uv for this machine")

    Path("requirements.lock").write_text("uv==1.0 \\\n    --hash=sha256:" + "0" * 64 + "\n")
    monkeypatch.setattr(script, "find_uv", lambda venv: "")
    monkeypatch.setattr(script, "run", run)
    script.install(Path(".venv"), "requirements.lock")
    assert len(commands) == 3
    for command in commands:
        assert command[:3] == [".venv/bin/python", "-m", "pip"]
    assert "--require-hashes" in commands[1]
    assert commands[1][-1] == "requirements.lock"


@pytest.mark.medium
def test_an_environment_without_an_installer_is_created_again(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], check=True)
    assert not script.works(Path(".venv"))
    Path(".venv", "bin", "uv").symlink_to(UV)
    assert script.works(Path(".venv"))


def test_an_unknown_failure_is_shown(script: Any) -> None:
    failure = "import sys; print('reading /x/connect.py'); print('error: no wheel for you'); sys.exit(3)"
    with pytest.raises(script.InstallError, match=r"(?s)no wheel for you.*failed with exit code 3"):
        script.run([sys.executable, "-c", failure], "requirements.lock")
