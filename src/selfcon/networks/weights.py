"""Weights that somebody else trained, as data: safetensors, or on explicit trust a .pth, of which tensors are read."""

from __future__ import annotations

import argparse
import hashlib
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from selfcon.errors import DataError, InputMissingError, UnsafeError, UsageError, name_some

_WRAPPED = ("state_dict", "model", "model_state", "encoder")  # how training scripts call what they save
_PREFIXES = (
    *("", "module.", "encoder.", "backbone.", "model.", "encoder_q."),
    *("module.encoder.", "model.encoder.", "encoder.module.", "module.encoder_q.", "module.backbone."),
)
_HEADS = ("fc.", "head.", "classifier.")
_OTHER_WORDS = {".shortcut.": ".downsample."}  # those of SupContrast's ResNets and of its descendants
_CHILDREN = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc")  # of a ResNet, those that have weights
_MOST_COMPRESSED, _ALWAYS_UNPACKED = 10, 1 << 24  # what comes out over what is there; bytes


def read_weights(path: str | Path, *, trust: bool = False) -> dict[str, Tensor]:
    """Tensors by name from a .safetensors file; any other is read only with `trust`, and runs no code then either."""
    path = Path(path)
    check_weights(path, trust=trust)
    if path.suffix == ".safetensors":
        try:
            return load_tensors(path.read_bytes())
        except (SafetensorError, ValueError, OverflowError) as error:
            raise UnsafeError(f"{path} is no sound safetensors file ({error}).") from error
    return _flatten(path, _unpickle(path))


def check_weights(path: str | Path, *, trust: bool) -> None:
    """Refuse what `read_weights` would refuse for its name, without reading it."""
    if not Path(path).is_file():
        raise InputMissingError(f"There is no file {path}.")
    if Path(path).suffix != ".safetensors" and not trust:
        raise UnsafeError(
            f"{path} may be a pickle, which can run code when it is read: ask for safetensors, or say --trust if you "
            f"know who made it."
        )


def _unpickle(path: Path) -> Any:
    _check_unpacked(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of protocols
            # Training scripts like to put their options beside the weights; a Namespace of them runs no code.
            with torch.serialization.safe_globals([argparse.Namespace]):
                return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f" ({found[1]})" if found else ""
        raise UnsafeError(
            f"{path} holds more than weights{what}, and was not read: save its state_dict alone."
        ) from error
    except Exception as error:  # whatever a broken file makes of a reader
        raise DataError(f"{path} cannot be read as weights ({type(error).__name__}).") from error


def _check_unpacked(path: Path) -> None:
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as file:
            unpacked = sum(info.file_size for info in file.infolist())
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as weights ({error}).") from error
    if unpacked > max(_ALWAYS_UNPACKED, _MOST_COMPRESSED * path.stat().st_size):
        raise UnsafeError(f"{path} would unpack to {unpacked:,} bytes, many times its size.")


def _flatten(path: Path, found: Any) -> dict[str, Tensor]:
    for key in _WRAPPED:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not found:
        raise DataError(f"{path} holds no weights by name.")
    return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}


def find_timm_weights(name: str) -> Path:
    """The file of a timm network's pretrained weights in the model hub's cache; nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache

    facts = timm.get_pretrained_cfg(name, allow_unregistered=False) if timm.is_model(name) else None
    if facts is None or not facts.hf_hub_id:
        raise UsageError(f"timm has no pretrained weights of {name}.")
    found = try_to_load_from_cache(facts.hf_hub_id, "model.safetensors")
    if not isinstance(found, str):
        raise InputMissingError(
            f"The weights of {facts.hf_hub_id} are not in this machine's cache of model files: "
            f"python -c \"import timm; timm.create_model('{name}', pretrained=True)\" fetches them, once."
        )
    return Path(found)


def load_encoder(encoder: nn.Module, weights: dict[str, Tensor], name: str) -> None:
    """Give an encoder those weights; a head in them is left out, anything else must fit."""
    wanted = {key: value.shape for key, value in encoder.state_dict().items()}
    for theirs, ours in _OTHER_WORDS.items():
        if not any(theirs in key for key in wanted):  # some have such parts of their own
            weights = {key.replace(theirs, ours): value for key, value in weights.items()}
    if {"conv1.weight", "layer4.0.conv1.weight"} <= wanted.keys():
        weights = _name_children(weights)
    prefix = max(_PREFIXES, key=lambda each: sum(f"{each}{key}" in weights for key in wanted))
    found = {key: weights[f"{prefix}{key}"] for key in wanted if f"{prefix}{key}" in weights}
    missing = [key for key in wanted if key not in found and not key.endswith("num_batches_tracked")]
    if missing:
        unused = [key for key in weights if key.removeprefix(prefix) not in found]
        has = f"; what it has instead: {name_some(unused, 3)}" if unused else ""
        raise UsageError(f"{name} holds no weights for {name_some(missing, 3)} of this network{has}.")
    if wrong := {key: (found[key].shape, wanted[key]) for key in found if found[key].shape != wanted[key]}:
        raise UsageError(_tell_shapes(name, wrong))
    spare = [
        key.removeprefix(prefix) for key in weights if key.startswith(prefix) and key.removeprefix(prefix) not in wanted
    ]
    if others := [key for key in spare if not key.startswith(_HEADS)]:
        raise UsageError(f"{name} holds weights that this network has no place for: {name_some(others)}.")
    encoder.load_state_dict(found, strict=False)


def _name_children(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of a ResNet whose children were put into a sequence, as lightly does: `backbone.0.weight`."""
    for prefix in _PREFIXES:
        places = {key: re.match(rf"{re.escape(prefix)}(\d+)\.", key) for key in weights}
        numbers = sorted({int(place[1]) for place in places.values() if place})
        if len(numbers) in (len(_CHILDREN) - 1, len(_CHILDREN)):
            names = dict(zip(numbers, _CHILDREN, strict=False))
            return {
                f"{prefix}{names[int(place[1])]}.{key[place.end() :]}" if place else key: weights[key]
                for key, place in places.items()
            }
    return weights


def _tell_shapes(name: str, wrong: dict[str, tuple[torch.Size, torch.Size]]) -> str:
    """The first that does not fit, and which setting would make it."""
    (key, (theirs, ours)), *others = wrong.items()
    more = f", and so on ({len(others)} more)" if others else ""
    hints = []
    if len(theirs) == len(ours) == 4 and theirs[2:] != ours[2:]:  # the first convolution alone has other kernels
        hints.append(f"--stem {'large' if theirs[2] > ours[2] else 'small'}")
    times = [theirs[0] / ours[0] for theirs, ours in wrong.values() if theirs and ours and theirs[0] != ours[0]]
    if times and (min(times) > 1 or max(times) < 1):
        hints.append(f"a --width {times[-1]:g} times this one")
    hint = f": {' and '.join(hints)} would fit" if hints else ""
    return f"{name} holds {key} of {list(theirs)}, where this network wants {list(ours)}{more}{hint}."


def load_subnetworks(subnetworks: nn.ModuleDict, weights: dict[str, Tensor]) -> list[str]:
    """Give each sub-network the weights that one of our models has for the same one; which found theirs."""
    loaded = []
    for exit_name, subnetwork in subnetworks.items():
        prefix = f"subnetworks.{exit_name}."
        found = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        wanted = {name: value.shape for name, value in subnetwork.state_dict().items()}
        if found and {name: value.shape for name, value in found.items()} == wanted:
            subnetwork.load_state_dict(found)
            loaded.append(exit_name)
    return loaded


def hash_file(path: str | Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()
