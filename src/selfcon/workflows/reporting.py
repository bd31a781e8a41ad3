"""`selfcon report`: run folders, and what all other verbs left in them, as one page. No data or network is opened."""

from __future__ import annotations

import base64
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from selfcon.config import Settings, flatten, make_settings, read_yaml
from selfcon.errors import DataError, InputMissingError, StorageError, UsageError, hint_path, name_some
from selfcon.evaluation.answers import distinct
from selfcon.paper.exhibits import get_exhibit, identify, list_exhibits
from selfcon.progress import say
from selfcon.report.page import RunPage, Section, Table, render
from selfcon.training.files import write_whole
from selfcon.training.folder import OF_SCRIPTS
from selfcon.workflows.several import several

Result = dict[str, Any]
_ACCURACIES = ("backbone", "exit", "ensemble")
_PICTURES = {
    "information": "What features know: information between input x, label y, intermediate T and last feature F",
    "information-and-accuracy": "Information and accuracy",
    "gradients": "How much gradient reaches each layer",
    "gradcam-exits": "Where the loss looks, by exit (Grad-CAM)",
    "gradcam-methods": "Where the loss looks, by method (Grad-CAM)",
    "generalization": "Training and test accuracy",
    "embedding": "Maps of every exit's features",
    "neighbours": "Nearest neighbours at every exit",
    "cost": "Parameters, multiply-adds, memory and time a step",
    "bounds": "The paper's bounds where the truth is known",
}
_LARGEST_PICTURE = 20_000_000  # bytes


def write_report(
    run_folders: Sequence[str | Path],
    *,
    out: str | Path | None = None,
    watch: float | None = None,
    after_each: Callable[[Path, Sequence[RunPage]], None] = lambda path, pages: None,
) -> Path:
    """One page for one run or many: RUN/report.html of a single one, else report.html, or `out`.

    With `watch` the page is written again every so many seconds, and loads itself again, until all runs are done.
    """
    run_folders = several(run_folders)
    if not run_folders:
        raise UsageError("Name at least one run folder.")
    if watch is not None and not watch >= 1:
        raise UsageError(f"A page is written again every so many seconds, at least 1, not {watch:g}.")
    named = [Path(folder) for folder in run_folders]
    found = _only_runs([run for folder in named for run in _runs_in(folder)])
    folders = list({folder.resolve(): folder for folder in found}.values())  # each run once
    beside = named[0] if len(named) == 1 else Path()  # the run, or the folder of its seeds
    path = Path(out) if out is not None else beside / "report.html"
    while True:
        pages = _with_distinct_names([read_page(folder) for folder in folders], folders)
        live = watch is not None and not all(page.done for page in pages)
        try:
            write_whole(path, _draw(pages, round(watch or 1) if live else None))
        except OSError as error:
            raise StorageError(f"{path} cannot be written ({error.strerror or error}).") from error
        after_each(path, pages)
        if not live:
            return path
        say("; ".join(f"{page.name}: {page.progress}" for page in pages if not page.done))
        time.sleep(watch or 1)


def _only_runs(folders: list[Path]) -> list[Path]:
    """Of several, those that hold a run: patterns match other things, too."""
    runs = [folder for folder in folders if (folder / "config.yaml").is_file()]
    if not runs and not folders[0].exists():
        raise InputMissingError(f"There is no folder {folders[0]}{hint_path(folders[0])}")
    if not runs:
        raise InputMissingError(f"{folders[0]} holds no run: config.yaml is not there.")
    if left := [str(folder) for folder in folders if folder not in runs]:
        say(f"note: left out, since they hold no run: {name_some(left)}")
    return runs


def _runs_in(folder: Path) -> list[Path]:
    """A folder as it is, or where it only holds runs, as one of several seeds does, those."""
    if (folder / "config.yaml").is_file() or not folder.is_dir():
        return [folder]
    return sorted(path.parent for path in folder.glob("[!.]*/config.yaml")) or [folder]


def _with_distinct_names(pages: list[RunPage], folders: Sequence[Path]) -> list[RunPage]:
    """Return the pages, with as many parent directories in front of equal names as make them differ."""
    parts = [folder.resolve().parts[1:] for folder in folders]
    for depth in range(2, max(map(len, parts)) + 1):
        counts = Counter(page.name for page in pages)
        pages = [
            replace(page, name="/".join(path[-depth:])) if counts[page.name] > 1 else page
            for page, path in zip(pages, parts, strict=True)
        ]
    return pages


def _draw(pages: Sequence[RunPage], refresh: int | None) -> bytes:
    try:
        return render(pages, refresh=refresh).encode("utf-8", "replace")
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, TemplateError) as error:
        names = ", ".join(page.name for page in pages)
        raise DataError(f"{names} cannot be shown: what lies there is not what a run writes ({error}).") from error


_MOST_STAGES = 20


def read_page(folder: Path) -> RunPage:
    """A run folder as the page shows it."""
    config = folder / "config.yaml"
    if not config.is_file():
        raise InputMissingError(f"{folder} holds no run: config.yaml is not there.")
    settings = make_settings(read_yaml(config))
    result = _read(folder / "results.json")
    page = RunPage(
        name=folder.resolve().name,
        settings={**flatten(settings.model_dump(mode="json")), "lr": settings.learning_rate},
        metrics=_read_lines(folder / "metrics.jsonl"),
        result=result or None,
        evidence=_read(folder / "evidence.json") or None,
        paper=_find_paper(settings, list(result.get("accuracy") or {})),
        sections=_find_sections(folder),
        added={name: known for name in OF_SCRIPTS if (known := _read(folder / name))},
    )
    try:
        _try(page)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder} cannot be shown: its results are not those of a run ({error}).") from error
    return page


def _try(page: RunPage) -> None:
    """Everything that a page takes for granted of files that somebody else may have written."""
    if len({str(line["stage"]) for line in page.metrics}) > _MOST_STAGES:
        raise ValueError("its metrics tell of too many stages")
    for line in page.metrics:
        str(line["stage"]), int(line["epoch"]), float(line["loss"]), float(line["seconds"])
    if page.result is not None:
        for values in page.result.get("accuracy", {}).values():
            float(values["top1"]), float(values["train_top1"])
        for key in ("seconds", "images_per_second", "peak_memory_bytes", "epochs", "seed"):
            float(page.result[key])
        str(page.result["device"]), str(page.result["model"])
    if page.evidence is not None:
        int(page.evidence["tested"]), int(page.evidence["mapped"]), dict(page.evidence["maps"])
        for pair in page.evidence["confusions"]:
            str(pair["true"]), str(pair["taken_for"]), int(pair["count"]), float(pair["share"])
        for each in page.evidence["wrong"]:
            str(each["image"]), str(each["true"]), str(each["taken_for"]), float(each["sure"])


@cache
def _paper_cells() -> dict[str, list[tuple[str, str, str]]]:
    """What the paper prints of accuracy, by experiment: exit, number, table."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for exhibit in list_exhibits():
        for cell in get_exhibit(exhibit).cells:
            told = cell.quantity in _ACCURACIES and cell.runs and not (cell.minus or cell.over or cell.made_by)
            if told and not cell.is_ours:
                key = identify(cell.settings("full"))
                found.setdefault(key, []).append((cell.quantity, cell.text, exhibit))
    return found


@cache
def _paper_lengths() -> list[int]:
    """Epochs that the paper trains for, the longest first."""
    cells = (cell for exhibit in list_exhibits() for cell in get_exhibit(exhibit).cells if cell.runs)
    return sorted({cell.settings("full").epochs for cell in cells if not cell.is_ours}, reverse=True)


def _find_paper(settings: Settings, answers: Sequence[str]) -> dict[str, str]:
    """The paper's accuracy of an experiment for each of our answers, whatever number of epochs was asked for here."""
    exits = [name for name in answers if name not in _ACCURACIES]
    found: dict[str, str] = {}
    for epochs in (settings.epochs, *_paper_lengths()) if answers else ():
        asked = make_settings(settings.model_dump(mode="json"), {"epochs": epochs, "keep_epochs": []})
        for quantity, text, exhibit in _paper_cells().get(identify(asked), ()):
            length = "" if epochs == settings.epochs else f", {epochs} epochs"
            name = exits[0] if quantity == "exit" and len(exits) == 1 else quantity
            found.setdefault(name, f"{text} ({exhibit}{length})")
        if found:
            break
    return found


def _find_sections(folder: Path) -> list[Section]:
    """What other verbs found out about a run."""
    sections = []
    analysis = folder / "analysis"
    try:
        if calibrated := _read(analysis / "calibration.json"):
            sections.append(_show_calibration(calibrated, analysis))
            if "early_exit" in calibrated:
                sections.append(_show_early_exit(calibrated["early_exit"], analysis))
        for name, title in _PICTURES.items():
            if picture := _picture(analysis / f"{name}.svg"):
                sections.append(Section(title, pictures={title: picture}))
        sections += _show_transfer(folder / "transfer")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder} cannot be shown: what lies in it is not what our verbs write ({error}).") from error
    return sections


def _show_calibration(found: Result, analysis: Path) -> Section:
    rows = [
        [name, float(each["top1"]), float(each["ece_before"]), float(each["ece"]), float(each["temperature"])]
        for name, each in found["answers"].items()
    ]
    held = found["held_out"]
    return Section(
        "How far to believe it",
        f"Chosen on {held['chosen_on']} ({held['images']:,}), measured on {held['told_of']} ({held['told_images']:,}). "
        f"ECE is how far probabilities are from the truth, in percent.",
        Table(["answer", "top 1, %", "ECE before", "ECE after", "temperature"], rows),
        _pictures(analysis, {"reliability": "Reliability", "risk": "Risk and coverage"}),
    )


def _show_early_exit(found: Result, analysis: Path) -> Section:
    chosen, alone = found["chosen"], found["alone"]
    rows = [["early exit", *_spent(chosen)], *([name, *_spent(each)] for name, each in alone.items())]
    text = (
        f"By {found['criterion']}, {100 * chosen['shares'][0]:.0f} % of the images are answered at the first exit, "
        f"for {100 * chosen['cost'] / alone['backbone']['cost']:.0f} % of the backbone's multiply-adds."
    )
    if not found.get("stored", True):  # earlier versions stored thresholds in any case
        held, other = found["held_out"], found["compared_with"]
        text = (
            f"Early exit is not worth it for this model, so no thresholds were stored. On the validation images it is "
            f"{held['accuracy']:.1f} % correct for {100 * held['cost'] / alone['backbone']['cost']:.0f} % of the "
            f"backbone's MACs. The {other} alone is {found['held_out_accuracy'][other]:.1f} % correct there, for "
            f"{100 * alone[other]['cost'] / alone['backbone']['cost']:.0f} %."
        )
    return Section(
        "Answering early",
        text,
        Table(["answer", "top 1, %", "multiply-adds, %", "ms an image"], rows),
        _pictures(analysis, {"early-exit": "Accuracy against cost"}),
    )


def _spent(each: Result) -> list[str | float | None]:
    return [float(each["accuracy"]), 100 * float(each["cost"]), float(each["milliseconds"])]


def _show_transfer(folder: Path) -> list[Section]:
    """What the encoder is worth at other tasks, a table a task."""
    sections = []
    classified: list[list[str | float | None]] = []
    for path in sorted(folder.glob("*/classify.json")):
        found = _read(path)
        for mode in ("linear", "knn", "finetune"):
            if mode in found:
                each = distinct(found[mode]["accuracy"])
                best = {name: float(values[found["metric"]]) for name, values in each.items()}
                numbers = [best.get("backbone"), best.get("ensemble")]
                classified.append([path.parent.name, found["method"], mode, *numbers])
    if classified:
        header = ["data", "encoder", "how", "backbone, %", "ensemble, %"]
        if all(row[-1] is None for row in classified):  # of networks with one exit
            header.pop()
            classified = [row[:-1] for row in classified]
        sections.append(Section("Other classes", table=Table(header, classified)))
    scenes: list[list[str | float | None]] = []
    pictures = {}
    for path in sorted(folder.glob("*/results.json")):
        found = _read(path)
        number = {"segment": "miou", "detect": "map"}.get(found.get("task", ""))
        if number is not None:
            scenes.append([path.parent.name, found["method"], found["task"], number, float(found[number])])
            if picture := _picture(path.parent / "predictions.png"):
                pictures[f"{found['task']} on {found['data']}"] = picture
    if scenes:
        sections.append(
            Section("Scenes", table=Table(["folder", "encoder", "task", "measure", "%"], scenes), pictures=pictures)
        )
    if corrupted := _read(folder / "corruption.json"):
        summary = distinct(corrupted["summary"])
        names = list(next(iter(summary.values())))
        rows: list[list[str | float | None]] = [
            [leave, float(corrupted["clean_error"][leave]), *(float(each[name]) for name in names)]
            for leave, each in summary.items()
        ]
        header = ["answer", "error, clean", *(name.replace("_", " ") for name in names)]
        kinds, severities = len(next(iter(corrupted["errors"].values()))), len(corrupted["severities"])
        text = f"{kinds} corruptions at {severities} severities of {corrupted['images']:,} images, in percent."
        sections.append(Section("Corrupted images", text, Table(header, rows)))
    return sections


def _pictures(folder: Path, names: dict[str, str]) -> dict[str, str]:
    found = {title: _picture(folder / f"{name}.svg") for name, title in names.items()}
    return {title: picture for title, picture in found.items() if picture}


def _picture(path: Path) -> str | None:
    """A picture as data that can stand inside the page, where nothing in it is executed."""
    if not path.is_file() or path.stat().st_size > _LARGEST_PICTURE:
        return None
    kind = {".svg": "svg+xml", ".png": "png"}[path.suffix]
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _read(path: Path) -> Result:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} cannot be read: it does not hold names and values.")
    return found


def _read_lines(path: Path) -> list[Result]:
    if not path.is_file():
        return []
    try:
        return [dict(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
