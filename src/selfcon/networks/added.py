"""Networks that a script added to timm's registry: what they are, so that a run knows them again."""

from __future__ import annotations

from typing import Any

import timm
import torch

from selfcon.described import hash_code, package_of
from selfcon.errors import added_elsewhere

_NO_SCRIPTS = frozenset(("builtins", "torch", "torchvision", "timm", "selfcon"))


def is_added(name: str) -> bool:
    """Whether the network of that name is one of a script, and neither timm's nor ours."""
    base = name.partition(".")[0]
    return timm.is_model(base) and package_of(timm.models.model_entrypoint(base)) not in _NO_SCRIPTS


def describe_network(name: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """Hashes of the text of a script's network: of its function, and by name of every class in it; else None."""
    if not is_added(name):
        return None
    try:
        with torch.device("meta"):
            encoder = timm.create_model(name, num_classes=0, **options)
    except RuntimeError:  # some cannot be made without memory
        encoder = timm.create_model(name, num_classes=0, **options)
    classes = {kind for module in encoder.modules() for kind in type(module).__mro__}
    theirs = [(kind.__qualname__, hash_code(kind)) for kind in classes if package_of(kind) not in _NO_SCRIPTS]
    return {**dict(sorted(theirs, key=str)), name: hash_code(timm.models.model_entrypoint(name))}


def check_there(name: str, described: Any, where: object) -> None:
    """Refuse to look for a network that a script added, going by what its run keeps of it, where the script is not."""
    if described is not None and not timm.is_model(name.partition(".")[0]):
        raise added_elsewhere("network", name, where)
