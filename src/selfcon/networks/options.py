"""Arguments of a network that somebody else wrote, in a recipe or a model folder: what they must not lead to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from selfcon.errors import UnsafeError
from selfcon.networks.backbones import WEIGHTS

_MOST = 100_000  # of any number
_MOST_MODULES = 20_000  # timm's largest networks have some thousands


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Refuse options that load weights from a file or an address, and numbers without bounds."""
    if leading := sorted(key for key in options.keys() & WEIGHTS if options[key]):
        raise UnsafeError(f"{where} holds a network whose {leading[0]} would be read from elsewhere.")
    for name, value in options.items():
        for number in _numbers(value):
            if not abs(number) <= _MOST:
                raise UnsafeError(f"{where} holds a network whose {name} is beyond {_MOST:,}.")


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _numbers(each)


@contextmanager
def bounded(where: str) -> Iterator[None]:
    """While it lasts, no network of more parts than any has can be built: that would take for ever."""
    count = 0

    def look(module: nn.Module, name: str, child: nn.Module | None) -> None:
        nonlocal count
        count += 1
        if count > _MOST_MODULES:
            raise UnsafeError(f"{where} holds a network of more than {_MOST_MODULES:,} parts.")

    handle = register_module_module_registration_hook(look)
    try:
        yield
    finally:
        handle.remove()
