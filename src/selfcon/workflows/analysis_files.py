"""What analyses share: the runs they open, and the JSON and pictures they write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfcon.errors import StorageError, UsageError
from selfcon.report.canvas import Picture
from selfcon.training.files import as_bytes, refuse_link, write_whole
from selfcon.workflows.trained import TrainedRun, open_run

Result = dict[str, Any]


def open_all(run_folders: Sequence[str | Path], device: str) -> list[TrainedRun]:
    """The runs of all folders."""
    if not run_folders:
        raise UsageError("Name at least one run folder.")
    return [open_run(folder, device) for folder in run_folders]


def choose_folder(run_folders: Sequence[str | Path | None], out: str | Path | None) -> Path:
    """Where results go: beside the one run, or into a folder of their own."""
    if out is not None:
        return Path(out)
    return refuse_link(Path(str(run_folders[0])) / "analysis") if len(run_folders) == 1 else Path("analysis")


def write(result: Result, pictures: Mapping[str, Picture], folder: Path, name: str | None = None) -> Result:
    """The result as NAME.json (by default the first picture's name) and every picture as SVG and PNG."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for title, picture in pictures.items():
            write_whole(folder / f"{title}.svg", picture.svg)
            write_whole(folder / f"{title}.png", picture.png)
        path = folder / f"{name or next(iter(pictures))}.json"
        write_whole(path, as_bytes(json.dumps(result, indent=1, ensure_ascii=False) + "\n"))
    except OSError as error:
        raise StorageError(f"{folder} cannot be written to ({error.strerror}).") from error
    return {**result, "files": sorted(str(folder / f"{title}.svg") for title in pictures)}


def label(run: TrainedRun, run_folders: Sequence[str | Path]) -> str:
    """The method's name where that tells the runs apart."""
    if len(run_folders) == 1:
        return run.settings.method
    names = [method_of(folder) for folder in run_folders]
    return run.settings.method if len(set(names)) == len(names) else run.name


def method_of(folder: str | Path) -> str:
    """The method of a run folder."""
    return str(json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))["method"])
