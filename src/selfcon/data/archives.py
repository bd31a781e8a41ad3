"""Archives of strangers: unpacked member by member, each looked at before a byte of it is written.

No member leaves the target by its name or by a link, none is a device, and the whole stays below a cap; what was
unpacked of an archive that breaks a rule is removed again. Python's own filter is not relied on: it could be led astray
(CVE-2025-4517).
"""

from __future__ import annotations

import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO, Any

from selfcon.errors import DataError, SelfconError, StorageError, UnsafeError

MOST_BYTES = 1 << 40
MOST_MEMBERS = 20_000_000
_MOST_COMPRESSED = 200  # what comes out, over what the archive takes
_ALWAYS_ALLOWED = 1 << 30  # bytes
_LEAST = 4096  # bytes that a member counts for, since file systems have no smaller ones
_LONGEST_HEADER = 1 << 20
_BLOCK = 1 << 20
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, LZMAError, NotImplementedError, RuntimeError)


def unpack(archive: Path, target: Path, *, most_bytes: int | None = None) -> Path:
    """Unpack a .tar (or .tar.gz, .tgz, ...) or .zip into a folder, whole or not at all."""
    if most_bytes is None:
        most_bytes = min(MOST_BYTES, max(_ALWAYS_ALLOWED, _MOST_COMPRESSED * archive.stat().st_size))
    try:
        target.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=target))
    except OSError as error:
        raise StorageError(f"{target} cannot be written ({error.strerror or error}).") from error
    try:
        members = _zip_members(archive) if zipfile.is_zipfile(archive) else _tar_members(archive)
        room = _Room(archive, most_bytes)
        for name, read in members:
            _write(staged / room.place(name), read, room)
        for child in list(staged.iterdir()):
            _merge(child, target / child.name)
    except _BROKEN as error:
        if isinstance(error, SelfconError):
            raise
        raise DataError(f"{archive} cannot be unpacked: {str(error).rstrip('.') or type(error).__name__}.") from error
    except OSError as error:
        if isinstance(error, SelfconError):
            raise
        raise StorageError(f"{archive} cannot be unpacked to {target} ({error.strerror or error}).") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return target


Member = tuple[str, Callable[[], IO[bytes]] | None]
"""A name and how to read it; None for a folder."""


def _tar_members(archive: Path) -> Iterator[Member]:
    with tarfile.open(archive, "r:*", tarinfo=_Info) as tar:
        for member in tar:
            if member.isdir():
                yield member.name, None
            elif member.isreg():
                yield member.name, lambda member=member: tar.extractfile(member)  # type: ignore[misc]
            else:
                raise UnsafeError(f"{archive} holds {member.name!r}, which is neither a file nor a folder.")


class _Info(tarfile.TarInfo):
    """Whose extended headers, names and comments, are not read into memory whatever their size."""

    def _proc_pax(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        self._check()
        return super()._proc_pax(tar)  # type: ignore[misc, no-any-return]

    def _proc_gnulong(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        self._check()
        return super()._proc_gnulong(tar)  # type: ignore[misc, no-any-return]

    def _check(self) -> None:
        if self.size > _LONGEST_HEADER:
            raise UnsafeError(f"An archive has a header of {self.size:,} bytes.")


def _zip_members(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            if stat.S_ISLNK(info.external_attr >> 16):
                raise UnsafeError(f"{archive} holds {info.filename!r}, which is a link.")
            yield info.filename, None if info.is_dir() else lambda info=info: file.open(info)  # type: ignore[misc]


class _Room:
    """What an archive may still write, and where."""

    def __init__(self, archive: Path, most_bytes: int) -> None:
        self.archive, self.most_bytes = archive, most_bytes
        self.left, self.members = most_bytes, 0

    def place(self, name: str) -> PurePosixPath:
        """Where a member goes, below the target."""
        self.members += 1
        if self.members > MOST_MEMBERS:
            raise UnsafeError(f"{self.archive} has more than {MOST_MEMBERS:,} members.")
        place = PurePosixPath(name.replace("\\", "/"))
        if place.is_absolute() or ".." in place.parts or "\0" in name or ":" in (place.parts or ("",))[0]:
            raise UnsafeError(f"{self.archive} holds {name!r}, which would be written outside its folder.")
        self.take(_LEAST)
        return place

    def take(self, count: int) -> None:
        """Note that so many bytes are to be written."""
        self.left -= count
        if self.left < 0:
            raise UnsafeError(f"{self.archive} would unpack to more than {self.most_bytes:,} bytes.")


def _write(path: Path, read: Callable[[], IO[bytes]] | None, room: _Room) -> None:
    try:
        (path if read is None else path.parent).mkdir(parents=True, exist_ok=True)
        if read is None:
            return
        file = path.open("xb")
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise UnsafeError(f"{room.archive} holds {path.name!r} twice, or as a file and as a folder.") from error
    with read() as source, file:
        while block := source.read(_BLOCK):
            room.take(len(block))
            file.write(block)


def _merge(source: Path, target: Path) -> None:
    """Move into place; a folder that is there already takes the new files beside its own."""
    if source.is_dir() and target.is_dir() and not target.is_symlink():
        for child in list(source.iterdir()):
            _merge(child, target / child.name)
    else:
        source.replace(target)


@contextmanager
def guarded_torchvision() -> Iterator[None]:
    """Let torchvision download what it knows the hash of, and unpack it by our rules."""
    from torchvision.datasets import utils

    def extract(from_path: str | Path, to_path: str | Path, compression: str | None = None) -> None:
        unpack(Path(from_path), Path(to_path))

    def download(url: str, root: str, filename: str | None = None, md5: str | None = None, **more: Any) -> None:
        if md5 is None:
            raise UnsafeError(f"Nobody has told the hash of {url}: download it yourself if you trust it.")
        download_url(url, root, filename, md5, **more)

    extractors, download_url = dict(utils._ARCHIVE_EXTRACTORS), utils.download_url
    utils._ARCHIVE_EXTRACTORS.update(dict.fromkeys(extractors, extract))
    utils.download_url = download
    try:
        yield
    finally:
        utils._ARCHIVE_EXTRACTORS.update(extractors)
        utils.download_url = download_url
