"""What a method of a script brings along to be trained or kept: modules in its fields."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from selfcon.described import is_module
from selfcon.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

Owner = TypeVar("Owner")
_MUTABLE = (MutableMapping, MutableSequence, MutableSet)


def find_parts(method: Any) -> dict[str, nn.Module]:
    """The modules among the fields of a method, by field."""
    return {each.name: value for each in fields(method) if is_module(value := getattr(method, each.name))}


def with_own_parts(method: Owner, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Owner:
    """The method with copies of its modules, so that whoever trains them leaves the first ones as they are."""
    parts = find_parts(method)
    if not parts:
        return method
    own = copy.copy(method)
    for name, part in copy.deepcopy(parts).items():  # together: what they share stays shared
        for mine, given in zip(part.parameters(), parts[name].parameters(), strict=True):
            mine.no_decay = getattr(given, "no_decay", False)  # type: ignore[attr-defined] # which is not copied
        object.__setattr__(own, name, part.to(device, dtype))
    return own


def check_fields(method: Any) -> None:
    """Refuse what would be changed in training and neither trained nor kept."""
    for each in fields(method):
        value = getattr(method, each.name)
        if is_module(value):
            continue
        for inner in _inside(value):
            if getattr(inner, "requires_grad", False):
                what = "a tensor that is trained"
            elif isinstance(inner, _MUTABLE):
                what = f"a {type(inner).__name__}, which can change while it is trained"
            elif is_module(inner):
                what = "a module among other things"
            else:
                continue
            raise UsageError(
                f"The field {each.name} of {method.name} holds {what}: put it into an nn.Module, and that into the "
                f"field, so that a run trains and keeps it; what does not change can be a tuple."
            )


def _inside(value: Any) -> Iterator[Any]:
    """A value, and what tuples and dataclasses hold."""
    yield value
    if isinstance(value, tuple):
        for each in value:
            yield from _inside(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _inside(getattr(value, field.name))
