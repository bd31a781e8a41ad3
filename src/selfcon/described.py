"""What an object of somebody's script is, as JSON that is the same in every process: values, and the text of code."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

_KNOWN = frozenset(("selfcon", "torch", "builtins"))  # whose code is not looked at
_ASIDE = frozenset(("paper",))  # what a method is called there changes nothing


def describe(method: Any) -> dict[str, Any]:
    """The fields of a dataclass, and of its class and those above it that are not ours, their text."""
    described = {each.name: _plain(getattr(method, each.name)) for each in fields(method) if each.name not in _ASIDE}
    return {**described, **_describe_class(type(method))}


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The names of what is not the same in two descriptions, and how tensors can be made so."""
    changed = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    drawn = any(isinstance(now.get(key), dict) and "tensors" in now[key] for key in changed)
    return ", ".join(changed) + ("; what a script draws is the same again after torch.manual_seed(0)" if drawn else "")


def package_of(what: Any) -> str:
    """Whose a class or function is."""
    return str(what.__module__).partition(".")[0]


def is_module(value: Any) -> bool:
    """Whether it is one of torch's, which need not be imported to know."""
    return hasattr(value, "named_parameters") and not isinstance(value, type)


def _describe_class(kind: type) -> dict[str, Any]:
    theirs = [each for each in kind.__mro__ if package_of(each) not in _KNOWN]
    if not theirs:
        return {}
    return {"class": [each.__qualname__ for each in theirs], "code": [hash_code(each) for each in theirs]}


def _describe_module(module: Any) -> dict[str, Any]:
    """Of a module the tensors that it begins with, and of those within it what they are and were told."""
    tensors = [[name, _hash_numbers(value)] for name, value in sorted(module.state_dict().items())]
    within = [[name, type(each).__qualname__, *_plain_attributes(each)] for name, each in module.named_modules()]
    return {"modules": within, "tensors": hashlib.sha256(repr(tensors).encode()).hexdigest()}


def _plain_attributes(module: Any) -> tuple[Any, Any]:
    told = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return _plain(told), _describe_class(type(module))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)  # which equals itself where it is no number
    if isinstance(value, Mapping):
        return sorted(([str(_plain(key)), _plain(each)] for key, each in value.items()), key=repr)
    if isinstance(value, Set):
        return sorted((_plain(each) for each in value), key=repr)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if is_module(value):
        return _describe_module(value)
    if isinstance(value, partial):
        return ["partial", _plain(value.func), _plain(value.args), _plain(value.keywords)]
    if isinstance(value, type) or inspect.isroutine(value):
        return [value.__qualname__, hash_code(value), *_enclosed(value)]
    if isinstance(value, Enum):
        return [type(value).__qualname__, value.name, _plain(value.value)]
    if isinstance(value, PurePath | bytes | complex) or type(value).__name__ in {"dtype", "device"}:
        return [type(value).__qualname__, repr(value)]
    return [type(value).__qualname__, _hash_numbers(value)]


_within: list[int] = []  # functions that are being described: one may have taken itself along


def _enclosed(value: Any) -> list[Any]:
    """What a function took along from where it was made; nothing where there is nothing."""
    cells = getattr(value, "__closure__", None) or ()
    if not cells or id(value) in _within:
        return []
    told = []
    _within.append(id(value))
    try:
        for name, cell in zip(value.__code__.co_freevars, cells, strict=True):
            with suppress(ValueError):  # nothing is in it yet
                told.append([name, _plain(cell.cell_contents)])
    finally:
        _within.pop()
    return [told]


def hash_code(what: Any) -> str | None:
    """Of the text; None where there is none, as for what was typed at a prompt."""
    with suppress(OSError, TypeError):
        return hashlib.sha256(inspect.getsource(what).encode()).hexdigest()
    return None


def _hash_numbers(value: Any) -> str | None:
    """Of a tensor or an array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()  # which has no bfloat16
    if not hasattr(value, "tobytes"):
        return None
    return hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()
