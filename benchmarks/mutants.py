"""Claim: the tests of the losses notice when a line of them is wrong.

Every operator, comparison, number and condition in src/selfcon/losses (the GPU kernels aside) is changed, one at a
time, and their tests are run: a mutant that no test notices survives, and is printed with its line.
    python benchmarks/mutants.py [--json FILE] [module ...]     (all: about an hour on one core; `make mutants` has two)
In FILE the modules that are not named keep what an earlier run found. Every mutant gets a process, forked from one that
has imported torch and runs the fast tests; those that survive get another, with the tests of several processes, which
are forked as well. For gather and ring it is the other way round.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOSSES = ROOT / "src" / "selfcon" / "losses"
MODULES = ["dense", "gather", "methods", "modules", "objective", "one_stage", "pairwise", "ring", "sets", "tiled"]
OF_SEVERAL_PROCESSES = {"gather", "ring"}
FAST = [
    f"tests/losses/test_{name}.py"
    for name in ("methods", "modules", "one_stage", "implementations", "precision", "invariances")
]
SLOW = ["tests/losses/test_gather.py"]
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not interpreter and not little_memory"]
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
    tree = ast.parse((LOSSES / f"{module}.py").read_text(encoding="utf-8"))
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


def unchanged(module: str) -> Mutant:
    return Mutant(module, 0, "none", ast.unparse(ast.parse((LOSSES / f"{module}.py").read_text(encoding="utf-8"))))


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


def find_survivors(mutants: Sequence[Mutant], tests: list[str], workers: int) -> list[Mutant]:
    """Those that none of the tests notices."""
    survivors: list[Mutant] = []
    running: dict[int, tuple[Mutant, float]] = {}
    waiting = list(mutants)
    while waiting or running:
        while waiting and len(running) < workers:
            mutant = waiting.pop(0)
            child = os.fork()  # never in a thread: the processes of a test would fail for want of the main one
            if not child:
                _run(tests, mutant)
            running[child] = (mutant, time.monotonic() + _SECONDS)
        time.sleep(0.02)
        for child, (mutant, end) in list(running.items()):
            lives = _lives(child, end)
            if lives is not None:
                del running[child]
                survivors += [mutant] * lives
    return sorted(survivors, key=lambda mutant: mutant.line)


def _lives(child: int, end: float) -> bool | None:
    """Whether all tests passed; None while they run, and to hang is to be noticed."""
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        return status == 0
    if time.monotonic() < end:
        return None
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _run(tests: list[str], mutant: Mutant) -> None:
    """Ends this process, with 0 if all tests pass with the mutant in place of its module."""
    try:
        os.setsid()  # so that the processes of a test that hangs end with it
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.meta_path.insert(0, _InPlace(mutant))
        import pytest

        # A process that was spawned would import the module as it was.
        processes: Any = importlib.import_module("torch.multiprocessing.spawn")
        processes.spawn = partial(processes.start_processes, start_method="fork")
        os._exit(int(pytest.main([*OPTIONS, *tests])))
    except BaseException:
        os._exit(1)


def write(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """What was found, beside what the file says of other modules."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, module in found.items():  # why one survives was written by hand, and stays
        known = {each["change"]: each for each in before.get("modules", {}).get(name, {}).get("survivors", ())}
        module["survivors"] = [{**known.get(each["change"], {}), **each} for each in module["survivors"]]
    modules = dict(sorted({**before.get("modules", {}), **found}.items()))
    total = sum(module["mutants"] for module in modules.values())
    survivors = sum(len(module["survivors"]) for module in modules.values())
    counts = {"mutants": total, "survivors": survivors, "score": round(100 * (1 - survivors / max(total, 1)), 1)}
    path.write_text(json.dumps({**before, **counts, "modules": modules}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("modules", nargs="*", metavar="module")
    parser.add_argument("--json", type=lambda path: Path(path).resolve(), metavar="FILE")
    options = parser.parse_args()
    if unknown := set(options.modules) - set(MODULES):  # `choices` would refuse the empty list in Python 3.11
        parser.error(f"no such module: {', '.join(sorted(unknown))}; there are {', '.join(MODULES)}")
    os.environ.setdefault("SELFCON_CASES", "12")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import pytorch_metric_learning.losses  # noqa: F401
    import timm  # noqa: F401
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # or every process would copy all of this to collect its garbage
    killed = total = 0
    workers = int(os.environ.get("WORKERS", "1"))
    for module in options.modules or MODULES:
        survivors = every = list(mutants_of(module))
        for tests in (SLOW, FAST) if module in OF_SEVERAL_PROCESSES else (FAST, SLOW):
            if not find_survivors([unchanged(module)], tests, workers):
                raise SystemExit(f"the tests fail without any change of {module}.py")
            survivors = find_survivors(survivors, tests, workers)
        killed, total = killed + len(every) - len(survivors), total + len(every)
        print(json.dumps({"module": module, "mutants": len(every), "survivors": len(survivors)}), flush=True)
        for mutant in survivors:
            print(f"  {module}.py:{mutant.line}: {mutant.change}", flush=True)
        if options.json:
            rows = [{"line": mutant.line, "change": mutant.change} for mutant in survivors]
            write(options.json, {module: {"mutants": len(every), "survivors": rows}})
    gc.unfreeze()
    print(f"{killed} of {total} mutants were noticed ({100 * killed / max(total, 1):.1f} %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
