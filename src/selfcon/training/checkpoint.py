"""Checkpoints that are whole or not there: staged beside, hashed, synchronised, renamed; two are kept.

A checkpoint is a folder with `state.safetensors` (every tensor) and `state.json` (every number, and the hashes of the
former and of itself). No pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from selfcon.errors import SelfconWarning, StorageError, UsageError
from selfcon.training.files import refuse_link, synchronise, write_whole

_FORMAT = 2
_KEPT = 2
_NAME = re.compile(r"step-\d{9,}")


@dataclass(frozen=True)
class Checkpoint:
    """What a stage needs to go on: its tensors by name, and facts that JSON can hold."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def save(folder: Path, name: str, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint of that name, step- and nine digits, and remove all but the newest two."""
    assert _NAME.fullmatch(name), "others are not found again"
    _refuse_links(folder)
    target, staged = folder / name, folder / f".{name}.part"
    data = save_tensors(plain(checkpoint.tensors))
    facts = {**checkpoint.facts, "format": _FORMAT, "sha256": hashlib.sha256(data).hexdigest()}
    facts["facts_sha256"] = _hash_facts(json.loads(json.dumps(facts)))  # as they will be read
    try:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        write_whole(staged / "state.safetensors", data)
        write_whole(staged / "state.json", json.dumps(facts, indent=1).encode())
        _take_place(staged, target)
        for old in _names(folder)[:-_KEPT]:
            shutil.rmtree(folder / old)
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        free = shutil.disk_usage(_existing(folder)).free
        raise StorageError(
            f"{target} cannot be written ({error.strerror or error}): "
            f"it needs {len(data):,} bytes, and {free:,} are free."
        ) from error
    return target


def _take_place(staged: Path, target: Path) -> None:
    """In place of one of the same name, which is there until this one is."""
    before = target.with_name(f".{target.name}.before")
    try:
        if target.exists():
            shutil.rmtree(before, ignore_errors=True)
            target.rename(before)
        staged.rename(target)
        synchronise(target.parent)
    finally:
        _bring_back(before, target)


def _bring_back(before: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(before, ignore_errors=True)
    elif before.exists():
        before.rename(target)


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, None where there never was one.

    Leftovers of a broken save are removed, and those that cannot be read set aside once another can.
    """
    _refuse_links(folder)
    if not folder.is_dir():
        return None
    for leftover in folder.glob(".step-*.part"):
        shutil.rmtree(leftover, ignore_errors=True)
    for before in folder.glob(".step-*.before"):
        _bring_back(before, folder / before.stem[1:])
    names = _names(folder)
    for number, name in enumerate(reversed(names)):
        try:
            found = _read(folder / name)
        except UsageError:
            raise
        except (OSError, ValueError, KeyError, RecursionError, SafetensorError) as error:
            warnings.warn(
                f"{folder / name} cannot be used ({error}); the one before is tried.", SelfconWarning, stacklevel=2
            )
        else:
            _set_aside(folder, names[len(names) - number :])
            return found
    if names:
        raise StorageError(f"No checkpoint in {folder} can be read: start anew with --overwrite.")
    return None


def read_newest(folder: Path) -> tuple[str, Checkpoint] | None:
    """The newest checkpoint and its name, for somebody who only reads; None where there is none."""
    path = newest(folder)
    if path is None:
        return None
    try:
        return path.name, _read(path)
    except (OSError, ValueError, KeyError, RecursionError, SafetensorError) as error:
        raise StorageError(f"{path} cannot be read ({error}).") from error


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two checkpoints hold the same numbers."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def _set_aside(folder: Path, names: list[str]) -> None:
    """Damaged ones, so that they do not count as the newest, and can still be looked at."""
    for name in names:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder / f"damaged-{name}", ignore_errors=True)
            (folder / name).rename(folder / f"damaged-{name}")


def newest(folder: Path) -> Path | None:
    """Where the newest checkpoint is."""
    names = _names(folder) if folder.is_dir() else []
    return folder / names[-1] if names else None


def _read(path: Path) -> Checkpoint:
    facts = json.loads((path / "state.json").read_text(encoding="utf-8"))
    if not isinstance(facts, dict):
        raise ValueError("state.json holds no facts")  # noqa: TRY004 - damage, not a mistake of a caller
    if (own := _hash_facts(facts)) != facts["facts_sha256"]:
        raise ValueError(f"state.json has the hash {own}, and {facts['facts_sha256']} was written")
    if facts["format"] != _FORMAT:
        raise UsageError(
            f"{path} is of format {facts['format']}, and this version of selfcon reads format {_FORMAT}: "
            f"go on with the version that wrote it, or start anew with --overwrite."
        )
    data = (path / "state.safetensors").read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != facts["sha256"]:
        raise ValueError(f"state.safetensors has the hash {found}, and {facts['sha256']} was written")
    return Checkpoint(load_tensors(data), facts)


def _hash_facts(facts: Mapping[str, Any]) -> str:
    """Of all facts but their own hash."""
    others = {name: value for name, value in facts.items() if name != "facts_sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors takes them: by name, on the CPU, and those that share their memory each with its own."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return found


def _refuse_links(folder: Path) -> None:
    """Of a stage and of all of them: what is old is removed there."""
    for place in (folder.parent, folder):
        refuse_link(place)


def _names(folder: Path) -> list[str]:
    """From the oldest to the newest."""
    found = (path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    return sorted(
        (path.name for path in found if path.is_dir() and not path.is_symlink()), key=lambda name: int(name[5:])
    )


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)
