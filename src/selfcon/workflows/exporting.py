"""`selfcon export`: a trained run as files for other programs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfcon.deploy.card import write_card
from selfcon.deploy.export import FORMATS
from selfcon.deploy.trust import read_trust
from selfcon.errors import StorageError, UsageError, unknown_name
from selfcon.evaluation.cost import count_multiply_adds, zero_image
from selfcon.progress import say
from selfcon.training.artifact import load_model

HUB = "hub"
_OF_A_MODEL = ("model.safetensors", "model.json", "calibration.json", "calibration.safetensors", "results.json")


def export(
    run_folder: str | Path, *, formats: Sequence[str] = (*FORMATS, HUB), out: str | Path | None = None
) -> dict[str, Any]:
    """Write a run's model into a folder (RUN/export unless told), in each of the formats.

    ONNX files and programs of torch.export are run once more and compared with the model before they count as written.
    """
    known = (*FORMATS, HUB)
    for name in formats:
        if name not in known:
            raise unknown_name("format", name, known)
    if not formats:
        raise UsageError(f"Name at least one format: {', '.join(known)}.")
    run, folder = Path(run_folder), Path(out) if out is not None else Path(run_folder) / "export"
    net, facts = load_model(run)
    if not net.classifiers and set(formats) != {"timm"}:
        raise UsageError(f"{run} has no classifiers yet: `selfcon probe` trains them.")
    trust = read_trust(run)
    files: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in formats:
            say(f"writing {name}")
            files += FORMATS[name](net, facts, trust, folder) if name != HUB else _write_hub(run, folder)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written to ({error.strerror or error}).") from error
    return {"run": run.resolve().name, "out": str(folder), "files": files}


def _write_hub(run: Path, folder: Path) -> list[str]:
    """The model with what belongs to it, and a page about it."""
    target = folder / HUB
    target.mkdir(exist_ok=True)
    files = [name for name in _OF_A_MODEL if (run / name).is_file()]
    for name in files:
        shutil.copyfile(run / name, target / name)
    net, facts = load_model(run)
    costs = {
        "parameters": sum(each.numel() for each in net.parameters()),
        "multiply_adds": count_multiply_adds(net, zero_image(net, int(facts["image_size"]))),
    }
    card = write_card(
        name=run.resolve().name,
        facts=facts,
        results=_read(run / "results.json"),
        environment=_read(run / "environment.json"),
        calibration=_read(run / "analysis" / "calibration.json"),
        costs=costs,
    )
    (target / "README.md").write_text(card)
    return [f"{HUB}/{name}" for name in (*files, "README.md")]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
