"""Claim: the tests of the losses notice when a line of them is wrong.

Every operator, comparison, number and condition in src/selfcon/losses (the GPU kernels aside) is changed, one at a
time, and a fast part of the tests is run: a mutant that no test notices survives, and is printed with its line.
    python benchmarks/mutants.py [module ...]          (all: about an hour on one core; `make mutants` takes two)
Processes are forked from one that has imported torch; those of gather and ring, whose tests start processes of their
own, run from a copy of the source.
"""

from __future__ import annotations

import ast
import copy
import importlib.abc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOSSES = ROOT / "src" / "selfcon" / "losses"
MODULES = ["dense", "gather", "methods", "modules", "objective", "one_stage", "pairwise", "ring", "sets", "tiled"]
STARTS_PROCESSES = {"gather", "ring"}
FAST = [f"tests/losses/test_{name}.py" for name in ("methods", "modules", "one_stage", "implementations", "precision")]
FAST += ["tests/losses/test_invariances.py", "-k", "not interpreter and not little_memory"]
SLOW = ["tests/losses/test_gather.py"]
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
OPTIONS += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
_SECONDS = 120
_SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.MatMult: ast.Add, ast.Mod: ast.Add, ast.Pow: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    module: str
    line: int
    change: str
    source: str


def mutants_of(module: str) -> Iterator[Mutant]:
    """Every change of a module, as its whole source."""
    tree = ast.parse((LOSSES / f"{module}.py").read_text())
    spared = {id(inner) for node in ast.walk(tree) for part in _spared(node) for inner in ast.walk(part)}
    nodes = [node for node in ast.walk(tree) if id(node) not in spared]
    for number, node in enumerate(nodes):
        for change in _changes(node):
            mutated = copy.deepcopy(tree)
            spared_there = {id(i) for n in ast.walk(mutated) for part in _spared(n) for i in ast.walk(part)}
            target = [each for each in ast.walk(mutated) if id(each) not in spared_there][number]
            before = ast.unparse(target)
            _apply(target, change)
            yield Mutant(module, getattr(node, "lineno", 0), f"{before} -> {ast.unparse(target)}", ast.unparse(mutated))


def _spared(node: ast.AST) -> Iterator[ast.AST]:
    """Parts that no test is meant to hold: annotations, texts, what is raised or warned of, and how."""
    if isinstance(node, ast.FunctionDef):
        yield from node.decorator_list
        yield from (
            argument.annotation
            for argument in ast.walk(node.args)
            if isinstance(argument, ast.arg) and argument.annotation
        )
        if node.returns:
            yield node.returns
    elif isinstance(node, ast.AnnAssign):
        yield node.annotation
    elif isinstance(node, ast.ClassDef):
        yield from node.decorator_list
    elif _is_told(node) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
        yield node


def _is_told(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == "warnings.warn"
    return isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom)


def _changes(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Compare | ast.BoolOp | ast.BinOp):
        operator = node.ops[0] if isinstance(node, ast.Compare) else node.op
        return ["swap"] if type(operator) in _SWAPS else []
    if isinstance(node, ast.UnaryOp):
        return ["drop"]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        return ["other"]
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return ["negate"]
    return []


def _apply(node: Any, change: str) -> None:
    if change == "swap":
        if isinstance(node, ast.Compare):
            node.ops[0] = _SWAPS[type(node.ops[0])]()
        else:
            node.op = _SWAPS[type(node.op)]()
    elif change == "drop":
        node.op = ast.UAdd() if isinstance(node.op, ast.USub) else node.op
        if isinstance(node.op, ast.Not | ast.Invert):
            inner = node.operand
            node.__class__, node.__dict__ = inner.__class__, {**inner.__dict__}
    elif change == "other":
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    else:
        node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)


class _InPlace(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a source in memory."""

    def __init__(self, mutant: Mutant) -> None:
        self.name, self.source = f"selfcon.losses.{mutant.module}", mutant.source

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def exec_module(self, module: Any) -> None:
        exec(compile(self.source, f"<{self.name}>", "exec"), module.__dict__)


def survives_forked(mutant: Mutant) -> bool:
    """Whether the fast tests notice nothing."""
    child = os.fork()
    if not child:
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            sys.meta_path.insert(0, _InPlace(mutant))
            import pytest

            os._exit(int(pytest.main([*OPTIONS, *FAST])))
        except BaseException:
            os._exit(1)
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def survives_apart(mutant: Mutant) -> bool:
    """The same with the tests that start processes, from a copy of the source."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copied, ignore=shutil.ignore_patterns("__pycache__"))
        (copied / "selfcon" / "losses" / f"{mutant.module}.py").write_text(mutant.source)
        environment = {**os.environ, "PYTHONPATH": f"{copied}{os.pathsep}{ROOT}"}
        command = [sys.executable, "-m", "pytest", *OPTIONS, *SLOW]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, check=False, capture_output=True, timeout=_SECONDS
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def main() -> int:
    os.environ.setdefault("SELFCON_CASES", "12")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import timm  # noqa: F401
    import torch

    torch.set_num_threads(1)
    chosen = sys.argv[1:] or MODULES
    killed = total = 0
    with ThreadPoolExecutor(int(os.environ.get("WORKERS", "1"))) as pool:
        for module in chosen:
            survives = survives_apart if module in STARTS_PROCESSES else survives_forked
            if not survives(Mutant(module, 0, "none", (LOSSES / f"{module}.py").read_text())):
                raise SystemExit(f"the tests fail without any change of {module}.py")
            every = list(mutants_of(module))
            survivors = [mutant for mutant, lives in zip(every, pool.map(survives, every), strict=True) if lives]
            killed, total = killed + len(every) - len(survivors), total + len(every)
            print(json.dumps({"module": module, "mutants": len(every), "survivors": len(survivors)}), flush=True)
            for mutant in survivors:
                print(f"  {module}.py:{mutant.line}: {mutant.change}", flush=True)
    print(f"{killed} of {total} mutants were noticed ({100 * killed / max(total, 1):.1f} %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
