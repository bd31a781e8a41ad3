"""The paper's tables as commands: planned, run at the smallest scale, compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from selfcon.losses.methods import get_method, list_methods
from selfcon.report.drawings import ITSELF, NEGATIVE, NOTHING, POSITIVE, list_sets
from selfcon.workflows.reproduce import describe_order, list_jobs, select
from tests.cli.calling import call

RUN = ["T10", "--scale", "smoke", "--only", "model=resnet18", "--only", "method=selfcon,selfcon-star,selfcon-m"]


@pytest.mark.slow
def test_from_plan_to_comparison(tmp_path: Path) -> None:
    listed = json.loads(call("reproduce", "list", "--json", cwd=tmp_path).stdout)
    assert len(listed) == 27
    assert {each["kind"] for each in listed} == {"table", "figure", "text"}

    planned = json.loads(call("reproduce", "plan", *RUN, "--device", "cpu", "--json", cwd=tmp_path).stdout)
    assert len(planned["runs"]) == 3
    assert all(each["seconds"] > 0 and each["bytes"] > 1e6 for each in planned["runs"])

    done = call("reproduce", "run", *RUN, "--seeds", "0,1", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "6 of 6 runs are done" in done.stdout
    again = call("reproduce", "run", *RUN, "--seeds", "0,1", "--device", "cpu", cwd=tmp_path)
    assert again.stderr.count("was there") == 6

    compared = json.loads(call("reproduce", "compare", *RUN, "--json", cwd=tmp_path).stdout)
    assert [cell["n"] for cell in compared["cells"]] == [2, 2, 2]
    for cell in compared["cells"]:
        results = [
            json.loads((tmp_path / "runs/reproduce/smoke" / folder / "results.json").read_text())
            for folder in cell["folders"]
        ]
        values = [result["accuracy"]["backbone"]["top1"] for result in results]
        assert cell["ours"] == pytest.approx(sum(values) / 2)
        assert "n=2" in cell["verdict"]
    (order,) = compared["orders"]
    assert order["paper"] == [["selfcon-star"], ["selfcon"], ["selfcon-m"]]
    nothing = call("reproduce", "compare", "T1", cwd=tmp_path).stdout
    assert nothing.endswith(
        "None of the runs in runs/reproduce/short or results is one of them; --results names others.\n"
    )
    missing = call("reproduce", "compare", "T1", "--results", "nope", cwd=tmp_path)
    assert (missing.returncode, missing.stderr) == (66, "selfcon: There is no folder nope.\n")
    text = call("reproduce", "compare", *RUN, cwd=tmp_path).stdout
    assert "3 of 3 numbers are measured, those of training at scale smoke" in text
    assert all(", ".join(sorted(cell["folders"])) in text for cell in compared["cells"])
    assert "75.4±0.1 | " in call("reproduce", "show", "T10", "--scale", "smoke", cwd=tmp_path).stdout


def test_figures_are_drawn(tmp_path: Path) -> None:
    done = call("reproduce", "show", "F1", "F2", "F4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "selfcon analyze gradients draws it" in done.stdout
    for name in ("F1", "F2"):
        assert (tmp_path / "runs/reproduce" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", [name for name in list_methods() if get_method(name).stages == 2])
def test_drawn_sets_are_those_of_the_loss(name: str) -> None:
    method = get_method(name)
    names, table = list_sets(method)
    assert len(names) == 4 * method.views * (2 if method.uses_exits else 1)
    anchors = (table != NOTHING).any(1)
    assert ((table == ITSELF).sum(1)[anchors] == 1).all()
    first = {names[column]: int(table[0, column]) for column in range(len(names))}
    if method.uses_labels and anchors[0]:
        assert first[next(each for each in names if each.startswith("cat 3"))] == POSITIVE
        assert first[next(each for each in names if each.startswith("bird"))] == NEGATIVE


def test_orders_in_words() -> None:
    order = {"quantity": "backbone", "condition": {"model": "resnet18", "lr": 0.5}, "tau": 0.5}
    sides = {"paper": [["a"], ["b", "c"]], "ours": [["c"], ["a"], ["b"]]}
    what, paper, ours = describe_order({**order, **sides})
    assert what == "resnet18, lr 0.5, backbone; Kendall's tau 0.50"
    assert (paper, ours) == ("a > b = c", "c > a > b")
    assert describe_order({**order, **sides, "tau": None})[0].endswith("no order to compare")


def test_differences_need_both_runs() -> None:
    cells = [cell for cell in select(["T3"]) if cell.minus == "ce" and cell.condition["data"] == "cifar100"]
    methods = {job.settings.method for job in list_jobs(cells, "full", [0], {"cifar100": "there/cifar100.npz"})}
    assert methods == {"ce", "selfcon"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["show"], 64, "wants to know which"),
        (["shw", "T1"], 64, "invalid choice"),
        (["show", "T99"], 64, "Unknown table or figure"),
        (["plan", "T1", "--scale", "shrt"], 64, "did you mean 'short'"),
        (["plan", "T1", "--only", "colour=red"], 64, "--only wants name=value"),
        (["run", "T1", "--seeds", "a"], 64, "--seeds wants whole numbers"),
        (["run", "T1", "--data", "cifar100"], 64, "--data wants name=path"),
        (["run", "T1", "--only", "method=ce", "--only", "data=cifar10", "--scale", "full"], 66, "cifar10"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    done = call("reproduce", *arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
