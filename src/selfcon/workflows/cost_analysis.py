"""What a step costs: methods, networks and batch sizes, with the paper's ratios beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from selfcon.analysis import cost as costs
from selfcon.config import Settings
from selfcon.errors import UsageError
from selfcon.losses.methods import get_method
from selfcon.networks.exits import DEFAULT_STAGE, Exit, parse_exits
from selfcon.paper.exhibits import get_exhibit
from selfcon.progress import say
from selfcon.report import figures
from selfcon.workflows.analysis_files import Result, choose_folder, write
from selfcon.workflows.findings import is_of
from selfcon.workflows.several import several
from selfcon.workflows.task import choose_device
from selfcon.workflows.trained import open_run


def cost(
    run_folder: str | Path | None = None,
    *,
    methods: Sequence[str] = ("supcon", "selfcon"),
    models: Sequence[str] = (),
    image_sizes: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
    exits: str | None = None,
    width: float | None = None,
    steps: int = 10,
    out: str | Path | None = None,
    device: str = "auto",
) -> Result:
    """Parameters, multiply-adds, memory and time a step, for all combinations (Tables 2, 15 and 16).

    What is not named is the run's, its stem, normalisation, heads and options included wherever the network is the
    run's, or ResNet-18 at 32 pixels with batches of 256. Sub-networks are the paper's: `fc` after stage 2, and `small`
    above 96 pixels.
    """
    methods, models = several(methods), several(models)
    if not methods:
        raise UsageError("Name at least one method with --methods.")
    run = None if run_folder is None else open_run(run_folder, device)
    ground = None if run is None else run.settings
    models = models or ((ground.model,) if ground else ("resnet18",))
    image_sizes = image_sizes or ((run.size,) if run else (32,))
    batch_sizes = batch_sizes or ((ground.batch_size,) if ground else (256,))
    chosen_width = width if width is not None else ground.width if ground else 1.0
    own = _find_own(ground) if ground and ground.model in models else {}  # what is not as the paper has it
    heads = {"num_classes": len(run.facts["classes"])} if run else {}
    chosen = choose_device(device)
    given = exits or (ground.exits if ground else None)
    rows = []
    for model in models:
        for size in image_sizes:
            usual = [Exit(DEFAULT_STAGE, "small" if size > 96 else "fc")]
            leaves = parse_exits(given) if given and given != "none" else usual
            for method in methods:
                get_method(method)
                for batch_size in batch_sizes:
                    each = costs.measure(
                        model,
                        method,
                        exits=leaves,
                        image_size=size,
                        batch_size=batch_size,
                        width=chosen_width,
                        network={**own, **heads} if ground and model == ground.model else {},
                        device=chosen,
                        steps=steps,
                    )
                    rows.append(each.to_dict())
                    say(_tell_cost(rows[-1]))
    where = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else chosen.type
    result = {"device": where, "width": chosen_width, "network": own, "rows": rows}
    result["ratios"] = _cost_ratios(rows, as_in_paper=chosen_width == 1.0 and not own)
    folder = Path(out) if out is not None else choose_folder([run_folder], None) if run_folder else Path("analysis")
    measured = any(row["seconds"] is not None for row in rows)
    return write(result, {"cost": figures.draw_cost(rows)} if measured else {}, folder, name="cost")


def _find_own(settings: Settings) -> dict[str, Any]:
    """What a run asked for that changes its network, as arguments of `create_model`."""
    asked = settings.model_dump(include={"stem", "norm", "projection_dim"}, exclude_defaults=True)
    return {**asked, **settings.model_options}


def _tell_cost(row: Mapping[str, Any]) -> str:
    time = "does not fit" if row["seconds"] is None else f"{1000 * row['seconds']:.1f} ms"
    memory = "" if row["memory_bytes"] is None else f", {row['memory_bytes'] / 2**30:.2f} GiB"
    return f"{row['model']}, {row['image_size']} px, {row['method']}, batch {row['batch_size']}: {time}{memory}"


def _cost_ratios(rows: Sequence[Mapping[str, Any]], *, as_in_paper: bool) -> list[Result]:
    """SelfCon's time and memory over SupCon's, with the paper's ratio where it has one."""
    found = {(row["model"], row["image_size"], row["batch_size"], row["method"]): row for row in rows}
    ratios = []
    for (model, size, batch, method), row in found.items():
        other = found.get((model, size, batch, "supcon"))
        if method != "selfcon" or other is None:
            continue
        ratio: Result = {"model": model, "image_size": size, "batch_size": batch}
        for key, quantity in (("seconds", "time, seconds a step"), ("memory_bytes", "memory, GiB a GPU")):
            if row[key] is not None and other[key] is not None:
                ratio[key] = row[key] / other[key]
            theirs = [_paper_cost(each, quantity) for each in (row, other)]
            if theirs[0] is not None and theirs[1] is not None and as_in_paper:
                ratio[f"paper_{key}"] = theirs[0] / theirs[1]
        ratios.append(ratio)
    return ratios


def _paper_cost(row: Mapping[str, Any], quantity: str) -> float | None:
    exhibit = {"resnet18": "T15", "resnet50": "T16"}.get(row["model"])
    cells = get_exhibit(exhibit).cells if exhibit else ()
    return next((cell.value for cell in cells if cell.quantity == quantity and is_of(row, cell)), None)
