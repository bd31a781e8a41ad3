"""The run folder: what was asked, what happened, what came out. One process at a time."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch

import selfcon
from selfcon.config import Section, Settings, differences, make_settings, read_like, read_yaml, write_yaml
from selfcon.data.sources import list_sources
from selfcon.errors import DataError, InputMissingError, StorageError, UnsafeError, UsageError
from selfcon.training.files import as_bytes, inside, is_leftover, refuse_link, write_whole

OF_SCRIPTS = ("method.json", "network.json", "policy.json", "probe-policy.json")
"""What tells a method, a network or a policy that a script added from another of its name."""
_WRITTEN = (
    *("config.yaml", "environment.json", "metrics.jsonl", "model.safetensors", "model.json", "results.json"),
    *("data.json", *OF_SCRIPTS, "evidence.json", "report.html"),
    *("checkpoints", "encoders", "tensorboard", "wandb", "wandb-id", "predictions.png"),
    *(
        "calibration.json",
        "calibration.safetensors",
        "analysis",
        "export",
        "transfer",
    ),  # what other verbs found of its model
)


_BEFORE = ".before"  # what is to be overwritten, until there is something to take its place
_REFUSED = (UsageError, DataError, InputMissingError, UnsafeError)


class RunFolder:
    """A folder held by this process while it is open; leaving the `with` block lets go of it."""

    def __init__(self, path: Path, lock: IO[bytes] | None, made: Sequence[Path] = ()) -> None:
        self.path = path
        self._lock = lock
        self._made = made  # what was not there before, the innermost first

    @property
    def follows(self) -> bool:
        """Whether another process writes."""
        return self._lock is None

    @classmethod
    def follow(cls, path: str | Path) -> Self:
        """The folder for a process that another one writes for."""
        return cls(Path(path), None)

    @classmethod
    def open(cls, path: str | Path, settings: Section, *, verb: str, overwrite: bool = False) -> Self:
        """The folder of a run with these settings, new or to be gone on with; others in it are refused."""
        path = Path(path)
        made = [place for place in (path, *path.parents) if not place.exists()]
        run = cls(path, _hold(path), made)
        try:
            asked = path / "config.yaml"
            run._bring_back()
            _remove_leftovers(path)
            _check_is_run(path)
            if _never_began(path):
                run._clear()
            elif overwrite and not _is_of_this_launch(path):
                run._set_aside()
            else:
                _check_same_run(path, settings)
            if not asked.exists():
                run.write("config.yaml", write_yaml(settings))
            if not (path / "environment.json").exists():
                run.write("environment.json", json.dumps(describe_environment(verb), indent=1))
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def reopen(cls, path: str | Path) -> tuple[Self, Settings]:
        """The folder of an earlier run, and its settings."""
        if not (Path(path) / _BEFORE / "config.yaml").is_file():
            read_settings(path)  # before anything is held
        run = cls(Path(path), _hold(Path(path)))
        try:
            run._bring_back()
            return run, read_settings(path)
        except BaseException:
            run.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.begin()
        overwriting = (self.path / _BEFORE).exists()
        if self._lock is not None and isinstance(error, _REFUSED) and not overwriting and _never_began(self.path):
            self._clear()  # what was refused is no run: nothing is left of it
            (self.path / ".lock").unlink(missing_ok=True)
            with suppress(OSError):  # somebody else's is in there
                for place in self._made:
                    place.rmdir()
        self.close()

    def close(self) -> None:
        """Let go of the folder; what was to be overwritten and was not is as it was."""
        if self._lock is not None and not self._lock.closed:
            with suppress(OSError):  # the next one to open it tries again
                self._bring_back()
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # which processes that were forked would hold on to
            self._lock.close()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write(self, name: str, content: str | bytes) -> Path:
        """A file of the run, whole or not at all."""
        if self._lock is None:
            return self.path / name
        try:
            write_whole(self.path / name, as_bytes(content) if isinstance(content, str) else content)
        except OSError as error:
            raise StorageError(f"{self.path / name} cannot be written ({error.strerror or error}).") from error
        return self.path / name

    def read_json(self, name: str) -> Any:
        """A file of the run, or None where it is not there."""
        path = inside(self.path, name)
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (ValueError, RecursionError) as error:
            raise _damaged(path, error) from error

    def write_metrics(self, lines: list[dict[str, Any]]) -> None:
        """The whole of metrics.jsonl: a line an epoch."""
        self.write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl so far."""
        path = inside(self.path, "metrics.jsonl")
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError, RecursionError) as error:
            raise _damaged(path, error) from error

    def begin(self) -> None:
        """There is something that takes the place of what is overwritten, which is not needed any more."""
        before = self.path / _BEFORE
        if self._lock is not None and before.is_dir() and not before.is_symlink():
            (before / "config.yaml").unlink(missing_ok=True)  # from here on there is no way back
            shutil.rmtree(before, ignore_errors=True)

    @property
    def has_begun(self) -> bool:
        """Whether it can be gone on with: it has learnt something, and nothing would come back in its place."""
        return has_learnt(self.path) and not (self.path / _BEFORE).exists()

    def _set_aside(self) -> None:
        """What is to be overwritten, config.yaml first: while that lies there, the old run can come back."""
        before = refuse_link(self.path / _BEFORE)
        try:
            before.mkdir()
            for name in _WRITTEN:
                if (self.path / name).exists() or (self.path / name).is_symlink():
                    (self.path / name).rename(before / name)
        except OSError as error:
            raise StorageError(f"{before} cannot be written ({error.strerror or error}).") from error

    def _bring_back(self) -> None:
        """What was to be overwritten, unless something has taken its place; config.yaml last."""
        before = self.path / _BEFORE
        if before.is_symlink() or not (before / "config.yaml").is_file():
            self.begin()  # which was not finished, if it was begun
            return
        if (self.path / "config.yaml").exists():  # of the run that did not come to anything, like all that is here
            self._clear()
        for name in reversed(_WRITTEN):
            if (before / name).exists() or (before / name).is_symlink():
                (before / name).replace(self.path / name)
        before.rmdir()

    def _clear(self) -> None:
        """Remove what a run writes, and nothing else."""
        for name in reversed(_WRITTEN):  # config.yaml last: as long as it is there, this is a run
            child = self.path / name
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink(missing_ok=True)


def has_learnt(path: str | Path) -> bool:
    """Whether a folder holds a run that has trained, and so needs no more what it began with."""
    kept = Path(path) / "checkpoints"
    return any(any(kept.glob(pattern)) for pattern in ("*/step-*", "*/.step-*.before"))


def read_settings(path: str | Path) -> Settings:
    """Those of an earlier run."""
    if not (Path(path) / "config.yaml").is_file():
        raise InputMissingError(f"{path} holds no run: config.yaml is not there.")
    return make_settings(read_yaml(Path(path) / "config.yaml"))


def _damaged(path: Path, error: Exception) -> StorageError:
    return StorageError(f"{path} is damaged ({error}): start anew with --overwrite, or put back what it was.")


def _remove_leftovers(path: Path) -> None:
    """Halves of files, of processes that were killed or found no room."""
    encoders = path / "encoders"
    for place in (path, encoders) if encoders.is_dir() and not encoders.is_symlink() else (path,):
        for child in place.iterdir():
            if is_leftover(child) and not child.is_dir():
                child.unlink(missing_ok=True)


def _check_is_run(path: Path) -> None:
    """Nothing is written into, let alone removed from, a folder of something else."""
    if not (path / "config.yaml").exists() and any(child.name != ".lock" for child in path.iterdir()):
        (path / ".lock").unlink(missing_ok=True)
        raise UsageError(f"{path} is not empty and holds no run: choose another --out.")


def _is_of_this_launch(path: Path) -> bool:
    """Whether torchrun begins these processes once more, and earlier ones of the same command began this run."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    with suppress(OSError, ValueError, AttributeError):
        begun = json.loads(inside(path, "environment.json").read_text(encoding="utf-8"))
        return bool(begun.get("launch") == _launch())
    return False


def _launch() -> str | None:
    """Which torchrun these processes are of: its id, and the process of it that begins them, with when that began."""
    name, agent = os.environ.get("TORCHELASTIC_RUN_ID"), os.getppid()
    if name is None:
        return None
    with suppress(OSError, IndexError):
        began = Path(f"/proc/{agent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        return f"{name} {agent} {began}"
    return f"{name} {agent}"


def _never_began(path: Path) -> bool:
    """Whether a run was refused before its first step: there is nothing to go on with."""
    return {child.name for child in path.iterdir()} <= {
        ".lock",
        "config.yaml",
        "environment.json",
        "data.json",
        *OF_SCRIPTS,
    }


def _check_same_run(path: Path, settings: Section) -> None:
    asked = path / "config.yaml"
    if asked.exists() and (changed := differences(read_like(asked, settings), settings, names=list_sources())):
        weights = path / "model.safetensors"
        learnt = f" (where --init {weights} begins with what it learnt)" if weights.exists() else ""
        raise UsageError(
            f"{path} holds a run with other settings ({'; '.join(changed)}): "
            f"choose another --out{learnt}, or start anew with --overwrite."
        )


def _hold(path: Path) -> IO[bytes]:
    """The lock of a folder, which is made if need be; refused before anything is done where it cannot be written."""
    refuse_link(path / ".lock")
    if path.exists() and not path.is_dir():
        raise StorageError(f"{path} cannot be written (it is a file).")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b", buffering=0)
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror or error}).") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        holder = lock.read().decode(errors="replace").strip() or "another process"
        lock.close()
        raise UsageError(f"{path} is in use by {holder}.") from error
    if not _is_there(lock, path / ".lock"):  # another process was refused, and took it away with its folder
        lock.close()
        return _hold(path)
    try:
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}".encode())
    except OSError as error:
        lock.close()
        raise StorageError(f"{path} cannot be written ({error.strerror or error}).") from error
    _held.add(lock)
    return lock


_held: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _let_go() -> None:
    """In a process that was forked: it outlives ours by a moment, and must not hold our folders meanwhile."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go)


def _is_there(lock: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except OSError:
        return False


def describe_environment(verb: str) -> dict[str, Any]:
    """What produced a run."""
    return {
        "verb": verb,
        "date": datetime.now(UTC).date().isoformat(),
        "selfcon": selfcon.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            name: _version(name) for name in ("torch", "torchvision", "timm", "numpy", "pillow", "safetensors")
        },
        "cpu_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": ["selfcon", *sys.argv[1:]],
        **({} if (launch := _launch()) is None else {"launch": launch}),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
