"""The comparison of benchmarks/same_results.py; its dumps are made by hand."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import selfcon
from selfcon.config import NAMES

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "same_results.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("same_results", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["same_results"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


Items = dict[str, tuple[str, dict[str, Any]]]
Compare = Callable[..., tuple[int, list[str]]]

ITEMS: Items = {
    "loss/selfcon": ("loss", {"value": np.float32(5.25), "gradient": np.linspace(-2, 2, 9, dtype=np.float32)}),
    "draws/order": ("bit", {"samples": np.arange(7)}),
    "run/first-step": ("first-step", {"loss": 7.5}),
    "run/accuracy": ("accuracy", {"test.backbone": 80.0}),
    "run/weights": ("run", {"tensors": ["F32 [2] aa", "F32 [2] bb", "I64 [] cc"]}),
    "reopened/logits": ("reopened", {"logits": np.linspace(-4, 4, 5)}),
    "reopened/ood": ("ood", {"scores": np.linspace(0, 1, 5)}),
}


@pytest.fixture
def compare(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Compare:
    """Return a function that compares ITEMS with changed ones through the command line."""

    def write(name: str, items: Items, torch: str) -> str:
        dump = script.Dump()
        for item, (kind, parts) in items.items():
            dump.add(item, kind, parts)
        dump.write(tmp_path / name, {"torch": torch})
        return str(tmp_path / name)

    def run(changes: Items, *options: str, without: str = "", torch: str = "2.6") -> tuple[int, list[str]]:
        after = {name: item for name, item in {**ITEMS, **changes}.items() if name != without}
        files = [write("a.npz", ITEMS, "2.6"), write("b.npz", after, torch)]
        monkeypatch.setattr(sys, "argv", ["same_results.py", "--compare", *files, *options])
        code: int = script.main()
        return code, capsys.readouterr().out.splitlines()

    return run


def change(name: str, **parts: Any) -> Items:
    kind, before = ITEMS[name]
    return {name: (kind, {**before, **parts})}


def test_equal_dumps_are_equal(compare: Compare) -> None:
    code, lines = compare({})
    assert code == 0
    assert [line.split() for line in lines[:-1]] == [[name, "equal"] for name in ITEMS]
    assert len({line.index("equal") for line in lines[:-1]}) == 1
    assert lines[-1] == "7 items: 7 equal, 0 different, 0 missing"


def test_one_bit_makes_a_difference(compare: Compare) -> None:
    code, lines = compare(change("loss/selfcon", value=np.nextafter(np.float32(5.25), np.float32(6))))
    assert code == 1
    assert lines[0].split(maxsplit=1) == [
        "loss/selfcon",
        "differs: value max difference 4.8e-07 (9.1e-08 of the largest magnitude)",
    ]
    assert lines[-1] == "7 items: 6 equal, 1 different, 0 missing"


@pytest.mark.parametrize(
    ("before", "after"),
    [(np.nan, 1.0), (1.0, np.inf), (1, 1.0), ([1.0, 2.0], [[1.0, 2.0]]), (np.float32(1), np.float64(1)), ("1", 1)],
)
def test_types_shapes_and_special_values_count(script: ModuleType, before: Any, after: Any) -> None:
    for kind in script.RULES:
        assert status(script, kind, before, after) == "differs"


def test_flags_are_counted(script: ModuleType) -> None:
    flags = [True, True, True], [True, False, False]
    a, b = ({"x": script.Item("x", "reopened", {"flip": np.array(each)})} for each in flags)
    assert script.compare_items(a, b)[0].text == "differs: flip has 2 of 3 values that differ"


def test_the_sign_of_zero_counts_where_bits_do(script: ModuleType) -> None:
    assert status(script, "bit", 0.0, -0.0) == status(script, "loss", 0.0, -0.0) == "differs"
    assert status(script, "reopened", 0.0, -0.0) == "equal"


def status(script: ModuleType, kind: str, before: Any, after: Any) -> str:
    a, b = ({"x": script.Item("x", kind, {"value": script.as_array(each)})} for each in (before, after))
    return str(script.compare_items(a, b)[0].status)


def test_missing_items_and_parts_fail(compare: Compare) -> None:
    code, lines = compare({"draws/new": ("bit", {"words": [1]})}, without="draws/order")
    assert code == 1
    assert ["draws/order", "missing in B"] in [line.split(maxsplit=1) for line in lines]
    assert ["draws/new", "missing in A"] in [line.split(maxsplit=1) for line in lines]
    assert lines[-1] == "8 items: 6 equal, 0 different, 2 missing"
    code, lines = compare(change("draws/order", more=[1]))
    assert code == 1
    assert lines[1].endswith("differs: more is missing in A")


def test_a_kind_that_changes_fails(compare: Compare) -> None:
    code, lines = compare({"draws/order": ("run", ITEMS["draws/order"][1])}, "--tolerance", "0.1")
    assert code == 1
    assert lines[1].endswith("differs: its kind is bit in A and run in B")


def test_weights_are_compared_whatever_their_order(compare: Compare) -> None:
    assert compare(change("run/weights", tensors=["I64 [] cc", "F32 [2] bb", "F32 [2] aa"]))[0] == 0
    for tensors in (["F32 [2] aa", "F32 [2] aa", "I64 [] cc"], ["F32 [2] aa", "F32 [2] bb"]):
        code, lines = compare(change("run/weights", tensors=tensors))
        assert code == 1
        assert lines[4].endswith("differs: tensors has 1 of 3 entries that differ")


def test_names_of_weights_do_not_count(script: ModuleType, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    weights = {"encoder.conv": np.arange(6, dtype=np.float32).reshape(2, 3), "head": np.ones(3, np.float32)}
    for file, tensors in {
        "a": weights,
        "renamed": {"z": weights["encoder.conv"], "a": weights["head"]},
        "reshaped": {**weights, "encoder.conv": weights["encoder.conv"].reshape(3, 2)},
        "changed": {**weights, "head": np.array([1, 1, 2], np.float32)},
    }.items():
        save_file(tensors, tmp_path / file)
    found = script.hash_weights(tmp_path / "a")
    assert len(found) == 2
    assert script.hash_weights(tmp_path / "renamed") == found
    assert script.hash_weights(tmp_path / "reshaped") != found
    assert script.hash_weights(tmp_path / "changed") != found


@pytest.mark.parametrize(
    ("name", "part", "limit"), [("reopened/logits", "logits", 4e-6), ("reopened/ood", "scores", 1e-4)]
)
def test_reopened_runs_may_differ_a_little(compare: Compare, name: str, part: str, limit: float) -> None:
    values = ITEMS[name][1][part]
    assert compare(change(name, **{part: values + 0.9 * limit}))[0] == 0
    assert compare(change(name, **{part: values + 1.2 * limit}))[0] == 1
    assert compare(change(name, **{part: np.where(values > 0, np.nan, values)}))[0] == 1


def test_tolerance_is_for_losses_first_steps_and_accuracies(compare: Compare) -> None:
    gradient = ITEMS["loss/selfcon"][1]["gradient"]
    slight = {
        **change("loss/selfcon", gradient=gradient + np.float32(1.5e-6)),
        **change("run/first-step", loss=7.5 * (1 + 0.9e-6)),
        **change("run/accuracy", **{"test.backbone": 77.5}),
        **change("run/weights", tensors=["F32 [2] aa", "F32 [2] xx", "I64 [] cc"]),
        **change("reopened/logits", logits=np.linspace(-4, 5, 5)),
    }
    assert compare(slight)[0] == 1
    code, lines = compare(slight, "--tolerance", "1e-6")
    assert code == 0
    assert lines[-1] == "7 items: 4 equal, 0 different, 0 missing, 3 not compared"
    for larger in (
        change("loss/selfcon", gradient=gradient + np.float32(2.5e-6)),
        change("run/first-step", loss=7.5 * (1 + 1.2e-6)),
        change("run/accuracy", **{"test.backbone": 76.5}),
        change("draws/order", samples=np.arange(7) + (np.arange(7) == 3)),
    ):
        assert compare({**slight, **larger}, "--tolerance", "1e-6")[0] == 1


def test_versions_are_reported(compare: Compare) -> None:
    code, lines = compare({}, torch="2.7")
    assert code == 0
    assert lines[0] == "note: torch is 2.6 in A and 2.7 in B"


def test_files_that_are_not_dumps_fail(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "other.npz", x=np.ones(3))
    np.save(tmp_path / "array.npy", np.ones(3))
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 broken")
    script.Dump().write(tmp_path / "no-items.npz", {})
    for name in ("other.npz", "array.npy", "empty.npz", "broken.npz", "no-items.npz", "missing.npz"):
        file = str(tmp_path / name)
        monkeypatch.setattr(sys, "argv", ["same_results.py", "--compare", file, file])
        assert script.main() == 2
        assert name in capsys.readouterr().err


def test_an_item_is_added_once_and_holds_numbers(script: ModuleType) -> None:
    dump = script.Dump()
    dump.add("x", "bit", {"value": 1})
    for name, kind, parts in (("x", "bit", {"value": 1}), ("y", "sort", {"value": 1}), ("y", "bit", {})):
        with pytest.raises(script.SameResultsError, match=f"'{name}'"):
            dump.add(name, kind, parts)
    with pytest.raises(script.SameResultsError, match="object"):
        dump.add("y", "bit", {"value": [None]})


def test_comparing_needs_neither_selfcon_nor_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("selfcon", "torch", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)  # makes an import fail
    spec = importlib.util.spec_from_file_location("alone", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    alone = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "alone", alone)
    spec.loader.exec_module(alone)
    dump = alone.Dump()
    dump.add("x", "bit", {"value": [1.0]})
    dump.write(tmp_path / "a.npz", {})
    assert alone.compare(tmp_path / "a.npz", tmp_path / "a.npz", None) == 0


def test_settings_unknown_to_a_revision_are_left_out(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "SETTINGS_SINCE_010", frozenset({"head", "seed"}))
    monkeypatch.setitem(sys.modules, "selfcon.config", SimpleNamespace(NAMES=("epochs", "seed")))
    command = script.Adapter010().fit_command({"epochs": 2, "seed": 1, "head": "mlp", "epoch": 3}, "out")
    assert command[-6:] == ["--epochs", "2", "--seed", "1", "--epoch", "3"]  # a misspelled setting stays, and fails


def test_every_method_and_setting_is_in_the_dump(script: ModuleType) -> None:
    assert {*script.METHODS} == {*selfcon.list_methods(), "selfcon-mu-released"}
    assert {*script.SETTINGS} == {*NAMES} - {"weights", "model_options"}  # which can only be left out
    assert all({*changes} <= {*NAMES} for changes in script.RUNS.values())
    assert {script.INTERRUPTED, script.REOPENED} <= {*script.RUNS}


def test_another_lock_file_means_another_environment(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def build(path: Path, lock: Path) -> None:
        built.append(lock.read_text())
        (path / "bin").mkdir(parents=True)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(script, "build_environment", build)
    monkeypatch.setattr(script, "ROOT", tmp_path / "here")
    for name, lock in {"here": "torch==2.6", "same": "torch==2.6", "old": "torch==2.5"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / script.LOCK_FILE).write_text(lock)
    assert script.python_for(tmp_path / "same") == sys.executable
    first, second = (Path(script.python_for(tmp_path / "old")) for _ in range(2))
    assert first == second
    assert first.is_relative_to(tmp_path / "cache")
    assert built == ["torch==2.5"]


def test_an_environment_that_cannot_be_built_is_not_kept(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, lock: Path) -> None:
        path.mkdir(parents=True)
        raise script.SameResultsError(f"{lock} has a wrong hash.")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(script, "build_environment", fail)
    (tmp_path / script.LOCK_FILE).write_text("torch==2.4")
    with pytest.raises(script.SameResultsError, match="wrong hash"):
        script.python_for(tmp_path)
    assert not list((tmp_path / "cache" / "selfcon-same-results").iterdir())
