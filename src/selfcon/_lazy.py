"""Public names that are imported when they are first used, so that `import selfcon` costs next to nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from selfcon.errors import unknown_name


def attach(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose public names live in the modules that `names` tells.

    A name that its module ends in is that module itself. Type checkers see the imports that the package writes
    under TYPE_CHECKING; a test holds both lists equal.
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            hint = "" if name.startswith("_") else f": {unknown_name('name', name, names)}"
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        module = import_module(names[name])
        return module if names[name].endswith(f".{name}") else getattr(module, name)

    def __dir__() -> list[str]:
        return sorted({*names, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return __getattr__, __dir__
