"""A trained run asked about files: `selfcon predict`, `selfcon embed`, and `selfcon.load`."""

from __future__ import annotations

import glob
import io
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from selfcon.data.folders import describe_others, list_images
from selfcon.deploy import predictor as predictors
from selfcon.deploy.predictor import Prediction, Predictor
from selfcon.errors import BadImageError, DataError, InputMissingError, StorageError, UsageError
from selfcon.evaluation.answers import ENSEMBLE
from selfcon.progress import say, track
from selfcon.workflows.several import several
from selfcon.workflows.task import choose_device


def load(run_folder: str | Path, device: str = "auto") -> Predictor:
    """The model of a run folder, ready: `.predict(images, exit="ensemble")`, `.embed(images)`."""
    return predictors.load(run_folder, choose_device(device))


def find_images(paths: Iterable[str | Path]) -> list[Path]:
    """Files as they are, images of folders and all below, what patterns match, and with `-` lines of standard input.

    A line is a file or a folder, and no pattern.
    """
    found: list[Path] = []
    empty: list[Path] = []
    for path, may_match in _read_lines(several(paths)):
        if _is_folder(path):
            inside = [each for each in list_images(path) if each.is_file()]
            if not inside:
                empty.append(path)
            elif others := describe_others(path):
                say(f"note: of {path}, {others}")
            found += inside
        elif may_match and glob.has_magic(str(path)) and not os.path.lexists(path):
            matched = sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207 - patterns may begin at the root
            if not matched:
                raise InputMissingError(f"Nothing is called {path}.")
            found += [each for each in matched if each.is_file()]
        else:
            found.append(path)
    if empty and not found:
        raise InputMissingError(f"{empty[0]} holds no image.")
    for path in empty:
        say(f"note: {path} holds no image")
    if not found:
        raise UsageError("Name at least one image, a folder of images, or - to read their names.")
    return found


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, and the like: told when it is read
        return False


def _read_lines(paths: Iterable[str | Path]) -> Iterator[tuple[Path, bool]]:
    """Each path, and whether it may be a pattern."""
    for path in paths:
        if str(path) != "-":
            yield Path(path), True
            continue
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # names may be no text
        for line in sys.stdin:
            if "\0" in line:
                raise UsageError("Standard input is to hold names of images, one a line, and holds something else.")
            if line.strip():
                yield Path(line.rstrip("\r\n")), False


def predict(
    run_folder: str | Path,
    paths: Sequence[str | Path],
    *,
    exit: str = ENSEMBLE,  # noqa: A002 - the word for it
    budget: float | None = None,
    top: int = 1,
    batch_size: int = 64,
    device: str = "auto",
) -> Iterator[tuple[Path, Prediction | BadImageError]]:
    """The answer for every image that the paths lead to, or what is wrong with it."""
    model = load(run_folder, device)
    files = find_images(paths)
    answers = model.stream(files, exit=exit, budget=budget, top=top, batch_size=batch_size)
    return zip(files, track(answers, "Predicting", len(files)), strict=True)


def embed(
    run_folder: str | Path,
    paths: Sequence[str | Path],
    *,
    out: str | Path,
    batch_size: int = 64,
    device: str = "auto",
) -> list[BadImageError]:
    """Features of every image by exit into an .npz or a .parquet file; returns what could not be read."""
    out = Path(out)
    if out.suffix not in _WRITERS:
        raise UsageError(f"Features are written to {' or '.join(_WRITERS)}, not to {out.name}.")
    if out.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise UsageError("Parquet files need a package: pip install pyarrow.")
    model = load(run_folder, device)
    files = find_images(paths)
    failed: list[BadImageError] = []
    kept: list[Path] = []
    features: dict[str, list[Tensor]] = {name: [] for name in model.net.names}
    stream = model.stream_features(files, batch_size=batch_size)
    for path, found in zip(files, track(stream, "Embedding", len(files)), strict=True):
        if isinstance(found, BadImageError):
            failed.append(found)
            continue
        kept.append(path)
        for name, feature in found.items():
            features[name].append(feature)
    if not kept:
        raise DataError("None of these images can be read.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _WRITERS[out.suffix](out, kept, {name: torch.stack(each).numpy() for name, each in features.items()})
    except OSError as error:
        raise StorageError(f"{out} cannot be written ({error.strerror}).") from error
    return failed


def _as_text(file: Path) -> str:
    return str(file).encode("utf-8", "backslashreplace").decode()


def _write_npz(out: Path, files: Sequence[Path], features: Mapping[str, npt.NDArray[np.float32]]) -> None:
    arrays: dict[str, Any] = {"files": np.array([_as_text(file) for file in files]), **features}
    np.savez(out, **arrays)


def _write_parquet(out: Path, files: Sequence[Path], features: Mapping[str, npt.NDArray[np.float32]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: pa.FixedSizeListArray.from_arrays(each.ravel(), each.shape[1]) for name, each in features.items()}
    pq.write_table(pa.table({"file": [_as_text(file) for file in files], **columns}), out)


_WRITERS = {".npz": _write_npz, ".parquet": _write_parquet}
