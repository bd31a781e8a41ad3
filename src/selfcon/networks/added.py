"""Networks that a script added to timm's registry."""

from __future__ import annotations

import timm


def is_added(name: str) -> bool:
    """Whether the network of that name is one of a script, and neither timm's nor ours."""
    base = name.partition(".")[0]
    return timm.is_model(base) and timm.models.model_entrypoint(base).__module__.partition(".")[0] != "timm"
