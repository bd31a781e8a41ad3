"""The trained model as a file: weights in safetensors and what they mean in JSON. Equal runs give equal bytes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from selfcon.data.cutting import part_seen
from selfcon.described import differing
from selfcon.errors import (
    DataError,
    InputMissingError,
    SelfconError,
    SelfconWarning,
    StorageError,
    UnsafeError,
    UsageError,
    hint_path,
)
from selfcon.networks.added import check_there, describe_network
from selfcon.networks.exits import parse_exits
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.networks.options import bounded, check_options
from selfcon.networks.registry import create_model
from selfcon.networks.timm_config import tell_images
from selfcon.training.checkpoint import plain
from selfcon.training.files import inside, refuse_link
from selfcon.training.folder import RunFolder

_FORMAT = 1
_MOST_PIXELS = 4096


def save_model(run: RunFolder, net: MultiExitNetwork, facts: dict[str, Any]) -> None:
    """Write model.safetensors and model.json; `facts["network"]` are the arguments that build the network again."""
    weights = save_tensors(plain(net.state_dict()))
    told = {"format": _FORMAT, **facts, "weights_sha256": hashlib.sha256(weights).hexdigest()}
    run.write("model.safetensors", weights)
    run.write("model.json", json.dumps(told, indent=1, sort_keys=True) + "\n")


def save_encoder(run: RunFolder, epoch: int, module: nn.Module) -> None:
    """The weights of one epoch, for those who want to look at how they came about."""
    if run.follows:
        return
    folder = refuse_link(run.path / "encoders")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written ({error.strerror}).") from error
    data = save_tensors(plain(module.state_dict()))
    run.write(f"encoders/epoch-{epoch:04d}.safetensors", data)


def load_model(path: str | Path) -> tuple[MultiExitNetwork, dict[str, Any]]:
    """The network of a run folder in evaluation mode, and its facts.

    The folder may be somebody else's: nothing in it is executed, no file outside it is read, and no memory is taken for
    a network before the weights are seen to fit it.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"Expected the path of a run directory, but got a {type(path).__name__}.")
    path = Path(path)
    if missing := [name for name in ("model.json", "model.safetensors") if not (path / name).is_file()]:
        if path.is_file():
            raise InputMissingError(f"{path} is a file: name the folder of a run.")
        if not path.is_dir():
            raise InputMissingError(f"There is no folder {path}{hint_path(path)}")
        verb = "is" if len(missing) == 1 else "are"
        raise InputMissingError(f"{path} holds no trained model: {' and '.join(missing)} {verb} not there.")
    try:
        facts = json.loads(inside(path, "model.json").read_text(encoding="utf-8"))
        network = _check_network(path, facts["network"])
        _check_facts(facts)
        weights = inside(path, "model.safetensors").read_bytes()
        if facts.get("weights_sha256", digest := hashlib.sha256(weights).hexdigest()) != digest:
            raise DataError("model.safetensors is not the file that model.json tells of")
        tensors = load_tensors(weights)
        with bounded(str(path)):
            _check_same_network(path, network)
            _check_fit(network, tensors)
            net = build_model(network)
        net.load_state_dict(tensors)
        if broken := next((name for name, value in tensors.items() if not bool(value.isfinite().all())), None):
            raise DataError(f"{broken} holds values that are not finite")
    except SelfconError as error:
        if isinstance(error, UnsafeError | InputMissingError):
            raise
        raise DataError(f"{path} holds a model that cannot be read ({str(error).rstrip('.')}).") from error
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
        SafetensorError,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} holds a model that cannot be read ({reason}).") from error
    remember_images(net, facts)
    return net.eval(), facts


def remember_images(net: MultiExitNetwork, facts: dict[str, Any]) -> None:
    """Let the network carry how its images are seen, so that `to_timm()` gives a module that timm prepares them for."""
    size = int(facts["image_size"])
    part = part_seen(size, streamed=bool(facts.get("streamed")))
    tell_images(net.encoder, size=size, mean=facts["mean"], std=facts["std"], part=part)


def _check_network(path: Path, given: Any) -> dict[str, Any]:
    """The arguments that build the network, once none of them leads to a file or to a size without bounds."""
    network: dict[str, Any] = {**given, "options": dict(given["options"])}
    network["options"].pop("pretrained", None)  # the weights are here
    check_options({**network, **network["options"]}, str(path))
    return network


def _check_same_network(path: Path, network: dict[str, Any]) -> None:
    """A network that a script added is more than its name: without the script it is not there, and it may change."""
    if not (path / "network.json").is_file():
        return
    before, name = json.loads(inside(path, "network.json").read_text(encoding="utf-8")), network["name"]
    check_there(name, before, path)
    if before != (now := describe_network(name, network["options"])):
        changed = differing(before, now or {})
        warnings.warn(
            f"The network {name} is not the one that {path} was trained with ({changed}): its answers may be others.",
            SelfconWarning,
            stacklevel=3,
        )


def _check_facts(facts: dict[str, Any]) -> None:
    """What is used without a further look: classes, statistics, the side of images."""
    classes, count = facts["classes"], facts["network"].get("num_classes")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes) or not classes:
        raise DataError("its classes are no list of names")
    if count is not None and count != len(classes):
        raise DataError(f"it names {len(classes)} classes and has {count}")
    for name in ("mean", "std"):
        values = facts[name]
        if not isinstance(values, list) or len(values) != 3 or not all(math.isfinite(value) for value in values):
            raise DataError(f"its {name} is not three numbers")
    if min(facts["std"]) <= 0:
        raise DataError("its std is not above 0")
    size = facts["image_size"]
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _MOST_PIXELS:
        raise DataError(f"its images are of {size!r} pixels")
    if not all(isinstance(facts[name], str) for name in ("method", "data")):
        raise DataError("its method and data are no names")
    if not isinstance(facts.get("data_sha256", {}), dict):
        raise DataError("its data_sha256 is no table of hashes")


def _check_fit(network: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    try:
        with torch.device("meta"):
            wanted = {name: value.shape for name, value in build_model(network).state_dict().items()}
    except NotImplementedError:  # some networks cannot be built without memory
        return
    found = {name: value.shape for name, value in tensors.items()}
    if wrong := next((name for name in {**wanted, **found} if wanted.get(name) != found.get(name)), None):
        raise DataError(f"{wrong} is {found.get(wrong)} and not {wanted.get(wrong)}")


def build_model(network: dict[str, Any]) -> MultiExitNetwork:
    """A fresh network from the arguments that model.json keeps."""
    arguments = dict(network)
    name, exits, options = arguments.pop("name"), parse_exits(arguments.pop("exits")), arguments.pop("options")
    return create_model(name, exits=exits, **arguments, **options)
