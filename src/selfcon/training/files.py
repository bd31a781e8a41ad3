"""Files that are whole or not there, in folders that may be somebody else's: no link in them is written through."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from pathlib import Path

from selfcon.errors import UnsafeError

_LEFTOVER = re.compile(r"\..+\.(\d+)\.part")


def write_whole(path: Path, data: bytes) -> None:
    """A file that is on the disk when this returns; replaced at once where it was there, a link included."""
    staged = path.with_name(f".{path.name}.{threading.get_native_id()}.{os.getpid()}.part")
    staged.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
        raise


def as_bytes(text: str) -> bytes:
    """As UTF-8; what is no text, of a name in another encoding, as JSON and we write it elsewhere: with escapes."""
    return text.encode("utf-8", "backslashreplace")


def is_leftover(path: Path) -> bool:
    """Whether a file is what a process left that did not come to the end of `write_whole`."""
    found = _LEFTOVER.fullmatch(path.name)
    if found is None or len(found[1]) > 9:
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is somebody else's
        return False
    return int(found[1]) == os.getpid()


def synchronise(folder: Path) -> None:
    """Make a rename in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def refuse_link(path: Path) -> Path:
    """The path again, unless it is a link: below it files are written and removed, which would be somewhere else."""
    if path.is_symlink():
        raise UnsafeError(f"{path} is a link: nothing in a run folder is written through links.")
    return path


def inside(folder: Path, name: str) -> Path:
    """A file of a folder, to be read; refused where a link leads out of the folder, or where it is no plain file."""
    path = folder / name
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise UnsafeError(f"{path} is a link that leads out of its folder.")
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise UnsafeError(f"{path} is no plain file.")
    return path
