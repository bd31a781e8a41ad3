"""The trained model as a file: weights in safetensors and what they mean in JSON. Equal runs give equal bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from selfcon.errors import DataError, InputMissingError, UsageError
from selfcon.networks.exits import Exit
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.networks.registry import create_model
from selfcon.training.folder import RunFolder

_FORMAT = 1


def parse_exits(text: str) -> list[Exit]:
    """Exits from how settings write them: `2:fc`, `1:fc,2:same`, or `none`."""
    if not isinstance(text, str):
        raise UsageError(f"exits are written as STAGE:STRUCTURE, such as 2:fc, not {text!r}.")
    if text in ("", "none"):
        return []
    exits = []
    for part in text.split(","):
        after, _, structure = part.strip().partition(":")
        if not after.isdigit():
            raise UsageError(
                f"exits are written as STAGE:STRUCTURE, such as 2:fc or 1:fc,2:same, not {part.strip()!r}."
            )
        exits.append(Exit(int(after), structure or "fc"))  # type: ignore[arg-type]
    return exits


def save_model(run: RunFolder, net: MultiExitNetwork, facts: dict[str, Any]) -> None:
    """Write model.safetensors and model.json; `facts["network"]` are the arguments that build the network again."""
    state = net.state_dict()
    run.write("model.safetensors", save_tensors({name: state[name].cpu().contiguous() for name in sorted(state)}))
    run.write("model.json", json.dumps({"format": _FORMAT, **facts}, indent=1, sort_keys=True) + "\n")


def save_encoder(run: RunFolder, epoch: int, module: nn.Module) -> None:
    """The weights of one epoch, for those who want to look at how they came about."""
    (run.path / "encoders").mkdir(exist_ok=True)
    state = module.state_dict()
    data = save_tensors({name: state[name].cpu().contiguous() for name in sorted(state)})
    run.write(f"encoders/epoch-{epoch:04d}.safetensors", data)


def load_model(path: str | Path) -> tuple[MultiExitNetwork, dict[str, Any]]:
    """The network of a run folder in evaluation mode, and its facts. Nothing in the folder is executed."""
    path = Path(path)
    if not (path / "model.json").is_file() or not (path / "model.safetensors").is_file():
        raise InputMissingError(f"{path} holds no trained model: model.json and model.safetensors are not there.")
    try:
        facts = json.loads((path / "model.json").read_text())
        network = dict(facts["network"])
        exits = parse_exits(network.pop("exits"))
        options = network.pop("options")
        net = create_model(network.pop("name"), exits=exits, **network, **options)
        net.load_state_dict(load_tensors((path / "model.safetensors").read_bytes()))
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{path} holds a model that cannot be read ({error}).") from error
    return net.eval(), facts
