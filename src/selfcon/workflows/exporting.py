"""`selfcon export`: a trained run as files for other programs."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfcon.deploy.card import write_card
from selfcon.deploy.export import FORMATS
from selfcon.deploy.trust import read_trust
from selfcon.errors import DataError, StorageError, UsageError, unknown_name
from selfcon.evaluation.cost import count_multiply_adds, zero_image
from selfcon.networks.stages import Staged
from selfcon.networks.weights import hash_file
from selfcon.progress import say
from selfcon.training.artifact import load_model
from selfcon.training.files import inside, refuse_link
from selfcon.workflows.several import several

HUB = "hub"
_FOR_TIMM = "timm/config.json"
_OF_A_MODEL = (
    "model.safetensors",
    "model.json",
    "calibration.json",
    "calibration.safetensors",
    "results.json",
    "network.json",
)


def export(
    run_folder: str | Path, *, formats: Sequence[str] | None = None, out: str | Path | None = None
) -> dict[str, Any]:
    """Write a run's model into a folder (RUN/export unless told), in each of the formats, or in all that it can have.

    ONNX files and programs of torch.export are run once more and compared with the model before they take their places.
    """
    known = (*FORMATS, HUB)
    formats = None if formats is None else several(formats)
    for name in formats or ():
        if name not in known:
            raise unknown_name("format", name, known)
    if formats is not None and not formats:
        raise UsageError(f"Name at least one format: {', '.join(known)}.")
    run, folder = Path(run_folder), Path(out) if out is not None else refuse_link(Path(run_folder) / "export")
    net, facts = load_model(run)
    if formats is None:
        formats = [name for name in known if name != "stages" or isinstance(net.splitter, Staged)]
        if "stages" not in formats:
            say("note: no stages, since this network does not run stage by stage")
    if not net.classifiers and set(formats) != {"timm"}:
        raise UsageError(f"{run} has no classifiers yet: `selfcon probe` trains them.")
    trust = read_trust(run, net)
    files: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in formats:
            say(f"writing {name}")
            with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as staged:
                written = (
                    FORMATS[name](net, facts, trust, Path(staged)) if name != HUB else _write_hub(run, Path(staged))
                )
                _take_places(Path(staged), folder)
            files += written
            if name == "timm":
                say(_tell_loading(folder, alone=_FOR_TIMM in written))
    except OSError as error:
        raise StorageError(f"{folder} cannot be written to ({error.strerror or error}).") from error
    return {"run": run.resolve().name, "out": str(folder), "files": files}


def _tell_loading(folder: Path, *, alone: bool) -> str:
    if alone:
        return f"timm.create_model('local-dir:{folder / 'timm'}', pretrained=True) loads the encoder"
    about, published = _read(folder / "encoder.json"), {"stem": "large", "width": 1.0, "norm": "batch"}
    other = [f"{key} {about[key]}" for key, value in published.items() if about[key] != value]
    return (
        f"timm alone does not load this encoder ({', '.join(other) or about['architecture']}): "
        f"three lines in encoder.json load it with selfcon"
    )


def _take_places(staged: Path, folder: Path) -> None:
    """What is whole in place of what was there; of a folder nothing stays, unless it holds what is not ours."""
    for new in sorted(staged.iterdir()):
        old = folder / new.name
        if new.is_dir() and old.exists():
            foreign = sorted({each.name for each in old.iterdir()} - {*_OF_A_MODEL, "README.md", "config.json"})
            if foreign:
                raise UsageError(
                    f"{old} holds {foreign[0]}, which is not of an export: move it, or name another --out."
                )
            shutil.rmtree(old)
        new.replace(old)


def _write_hub(run: Path, folder: Path) -> list[str]:
    """The model with what belongs to it, and a page about it."""
    target = folder / HUB
    target.mkdir()
    files = [name for name in _OF_A_MODEL if (run / name).is_file()]
    for name in files:
        shutil.copyfile(inside(run, name), target / name)
    net, facts = load_model(run)
    net.projections.clear()  # which no answer uses
    costs = {
        "parameters": sum(each.numel() for each in net.parameters()),
        "multiply_adds": count_multiply_adds(net, zero_image(net, int(facts["image_size"]))),
    }
    found = _read(run / "analysis" / "calibration.json")
    card = write_card(
        name=run.resolve().name,
        facts=facts,
        results=_read(run / "results.json"),
        environment=_read(run / "environment.json"),
        calibration=found if found.get("model_sha256") == hash_file(run / "model.safetensors") else {},
        costs=costs,
    )
    (target / "README.md").write_text(card, encoding="utf-8")
    return [f"{HUB}/{name}" for name in (*files, "README.md")]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} cannot be read (it holds no names).")
    return found
