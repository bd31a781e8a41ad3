"""Metrics for those who watch elsewhere: TensorBoard or Weights & Biases, if they are installed and asked for."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from selfcon.config import flatten
from selfcon.errors import UsageError, unknown_name

Line = dict[str, Any]
LOGGERS = ("tensorboard", "wandb")


def check_logs(names: Sequence[str]) -> None:
    """Refuse loggers that nobody knows, or whose package is not there."""
    for name in names:
        if name not in LOGGERS:
            raise unknown_name("logger", name, LOGGERS)
        if find_spec(name) is None:
            raise UsageError(
                f"--log {name} needs a package that is not there: pip install '.[log]' in selfcon's folder."
            )


def open_logs(names: Sequence[str], folder: Path, settings: dict[str, Any]) -> Callable[[Line], None] | None:
    """A function that passes a line of metrics on to every logger that was asked for."""
    check_logs(names)
    writers = [(_tensorboard if name == "tensorboard" else _wandb)(folder, settings) for name in names]

    def log(line: Line) -> None:
        for write in writers:
            write(line)

    return log if writers else None


def _numbers(line: Line) -> dict[str, float]:
    values = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "epoch"}
    return {f"{line['stage']}/{key}": float(value) for key, value in values.items()}


def _tensorboard(folder: Path, settings: dict[str, Any]) -> Callable[[Line], None]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))
    asked = {name: value if isinstance(value, int | float) else str(value) for name, value in flatten(settings).items()}
    writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in asked.items()))

    def write(line: Line) -> None:
        numbers = _numbers(line)
        for name, value in numbers.items():
            writer.add_scalar(name, value, line["epoch"])
        if line["stage"] == "test":  # so that runs can be compared by what was asked of them
            writer.add_hparams(asked, numbers, run_name=".", global_step=line["epoch"])
        writer.flush()

    return write


def _wandb(folder: Path, settings: dict[str, Any]) -> Callable[[Line], None]:
    import wandb

    known = folder / "wandb-id"  # a run that is gone on with stays one run there, too
    if not known.exists():
        known.write_text(uuid.uuid4().hex, encoding="utf-8")
    try:
        run = wandb.init(
            project="selfcon",
            name=folder.name,
            dir=str(folder),
            config=settings,
            resume="allow",
            id=known.read_text(encoding="utf-8").strip(),
        )
    except wandb.errors.Error as error:
        raise UsageError(f"--log wandb does not work here: {str(error).rstrip('.')}.") from error

    def write(line: Line) -> None:
        run.log({**_numbers(line), "epoch": line["epoch"]})

    return write
