"""The analyses on run folders: every verb, what it writes, what it refuses, and the cells that it fills."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

import selfcon
from selfcon.cli.main import VERBS
from selfcon.cli.main import run as command
from selfcon.config import Settings, make_settings, read_yaml
from selfcon.errors import DataError, SelfconError, StorageError, UsageError
from selfcon.evaluation.cost import count_multiply_adds, zero_image
from selfcon.paper.exhibits import get_exhibit, identify
from selfcon.report.canvas import colour_of_exit, colour_of_method
from selfcon.workflows.cost_analysis import _cost_ratios
from selfcon.workflows.feature_analyses import _paper_information
from selfcon.workflows.findings import find_costs, found_in
from selfcon.workflows.loss_analyses import _some_of_each_class
from selfcon.workflows.reproduce import compare, find_runs
from selfcon.workflows.trained import open_run
from tests.workflows.conftest import write_stripes

SMALL: dict[str, Any] = {"width": 0.125, "epochs": 2, "batch_size": 32, "probe.epochs": 3, "device": "cpu"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs of three methods, and the folder that they are in."""
    folder = tmp_path_factory.mktemp("analyses")
    data = write_stripes(folder / "stripes.npz", train=240)
    for method in ("ce", "supcon", "selfcon"):
        selfcon.fit(data=str(data), method=method, out=folder / method, keep_epochs=[1, 2], **SMALL)
    return folder


def check_pictures(folder: Path, *names: str) -> None:
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        ET.fromstring((folder / f"{name}.svg").read_text())


@pytest.mark.slow
def test_information(runs: Path, tmp_path: Path) -> None:
    folders = [runs / "ce", runs / "selfcon"]
    result = selfcon.analyze.information(folders, seeds=2, steps=20, out=tmp_path, device="cpu")
    assert [each["method"] for each in result["runs"]] == ["ce", "selfcon"]
    for each in result["runs"]:
        assert each["split"] == "train"  # there are few test images
        assert each["after"] == 2
        assert [(e["between"], e["estimator"]) for e in each["estimates"]] == [
            (pair, name) for pair in ("x, T", "y, T", "F, T") for name in ("infonce", "mine", "nwj")
        ]
        assert all(len(e["values"]) == 2 for e in each["estimates"])
    assert result["paper"] == {}  # which is of other data
    told = _paper_information([{"method": "selfcon", "data": "cifar100", "model": "resnet18"}])
    assert told["selfcon"]["nwj, I(F; T)"] == 1.736
    assert json.loads((tmp_path / "information.json").read_text())["runs"] == result["runs"]
    check_pictures(tmp_path, "information", "information-and-accuracy")


def test_gradients(runs: Path) -> None:
    first = selfcon.analyze.gradients(runs / "selfcon", device="cpu")
    assert list(first["methods"]) == ["supcon", "selfcon-m"]
    assert list(first["factors"]) == ["0", "1", "2", "3", "4"]
    assert selfcon.analyze.gradients(runs / "selfcon", device="cpu") == first  # the same weights, the same batch
    trained = selfcon.analyze.gradients(runs / "selfcon", trained=True, device="cpu")
    assert trained["methods"]["supcon"]["blocks"] != first["methods"]["supcon"]["blocks"]
    check_pictures(runs / "selfcon" / "analysis", "gradients")
    with pytest.raises(UsageError, match="Two methods are compared, not supcon"):
        selfcon.analyze.gradients(runs / "selfcon", methods=["supcon"], device="cpu")
    with pytest.raises(UsageError, match="needs a sub-network"):
        selfcon.analyze.gradients(runs / "supcon", trained=True, device="cpu")


def test_gradcam(runs: Path) -> None:
    result = selfcon.analyze.gradcam(runs / "selfcon", images=3, device="cpu")
    assert list(result["mean_by_exit"]) == ["backbone", "exit2"]
    assert list(result["mean_by_method"]) == ["supcon", "selfcon-m"]
    assert len(set(result["classes"])) == len(result["images"]) == 3
    check_pictures(runs / "selfcon" / "analysis", "gradcam-exits", "gradcam-methods")
    alone = selfcon.analyze.gradcam(runs / "supcon", methods=["supcon"], after=3, images=30, device="cpu")
    assert list(alone["mean_by_exit"]) == ["backbone"]
    with pytest.raises(UsageError, match="has no exit: say after which stage"):
        selfcon.analyze.gradcam(runs / "supcon", device="cpu")
    with pytest.raises(UsageError, match="has no sub-network, which selfcon-m needs"):
        selfcon.analyze.gradcam(runs / "supcon", after=2, device="cpu")
    with pytest.raises(UsageError, match="without a contrastive loss"):
        selfcon.analyze.gradcam(runs / "ce", device="cpu")


def test_a_temperature_that_was_learnt_is_that_of_the_loss(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {**SMALL, "epochs": 1, "probe.epochs": 1, "loss.learn_temperature": True}
    selfcon.fit(data=str(runs / "stripes.npz"), out=tmp_path / "run", **options)
    learnt = open_run(tmp_path / "run", "cpu").temperature
    assert learnt not in (0.1, open_run(runs / "selfcon", "cpu").temperature)
    assert open_run(runs / "selfcon", "cpu").temperature == 0.1
    seen: list[float] = []
    for name in ("gradient_norms", "cams.loss_maps"):
        whole = f"selfcon.workflows.loss_analyses.{name}"

        def spy(real: Any, *args: Any, temperature: float, **more: Any) -> Any:
            seen.append(temperature)
            return real(*args, temperature=temperature, **more)

        monkeypatch.setattr(whole, partial(spy, resolve_name(whole)))
    selfcon.analyze.gradcam(tmp_path / "run", images=2, device="cpu")
    selfcon.analyze.gradients(tmp_path / "run", trained=True, device="cpu")
    assert set(seen) == {learnt}
    seen.clear()
    selfcon.analyze.gradients(tmp_path / "run", device="cpu")
    assert set(seen) == {0.1}
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    for wrong in ('"x"', "null", "1e999", "-1.0"):
        (tmp_path / "run" / "metrics.jsonl").write_text(
            metrics.replace(f'"temperature": {learnt}', f'"temperature": {wrong}')
        )
        with pytest.raises(DataError, match="does not tell the temperature"):
            selfcon.analyze.gradcam(tmp_path / "run", images=2, device="cpu")


def test_generalization(runs: Path, tmp_path: Path) -> None:
    result = selfcon.analyze.generalization([runs / "supcon", runs / "selfcon"], out=tmp_path, device="cpu")
    for each in result["runs"]:
        stored = json.loads((runs / each["method"] / "results.json").read_text())["accuracy"]["backbone"]
        assert (each["train"], each["test"]) == (stored["train_top1"], stored["top1"])
        assert [epoch["epoch"] for epoch in each["epochs"]] == [1, 2]
        assert all(20 < epoch["test"] <= 100 for epoch in each["epochs"])
    check_pictures(tmp_path, "generalization")


def test_embedding(runs: Path) -> None:
    result = selfcon.analyze.embedding(runs / "selfcon", neighbours_of=3, count=2, device="cpu")
    assert set(result["exits"]) == {"backbone", "exit2"}
    for nearest in result["neighbours"]["nearest"].values():
        assert len(nearest) == 2
        assert 3 not in [each["image"] for each in nearest]
        assert nearest[0]["cosine"] >= nearest[1]["cosine"]
    check_pictures(runs / "selfcon" / "analysis", "embedding", "neighbours")
    with pytest.raises(UsageError, match="there is no number 100000"):
        selfcon.analyze.embedding(runs / "selfcon", neighbours_of=100_000, device="cpu")


def test_cost_fills_its_cells(runs: Path, tmp_path: Path) -> None:
    result = selfcon.analyze.cost(batch_sizes=[2], steps=1, out=tmp_path, device="cpu")
    assert [row["method"] for row in result["rows"]] == ["supcon", "selfcon"]
    assert result["ratios"][0]["seconds"] > 0
    check_pictures(tmp_path, "cost")
    cells = compare(get_exhibit("T15").cells, "full", {}, find_costs([tmp_path]))
    measured = {each.cell.row: each for each in cells if each.ours and each.cell.quantity.startswith("parameters")}
    assert measured["selfcon"].ours[0] == pytest.approx(11.89, abs=0.01)
    assert {each.cell.condition["data"] for each in cells if each.ours} == {"cifar100"}
    assert "selfcon analyze cost" in next(each for each in cells if not each.ours).to_dict()["verdict"]
    rows = [{**row, "batch_size": 256} for row in result["rows"]]
    (ratio,) = _cost_ratios(rows, as_in_paper=True)
    assert ratio["paper_memory_bytes"] == pytest.approx(1.83 / 2.14)
    rows[1]["exits"] = "1:same,2:same,3:same"
    assert "paper_memory_bytes" not in _cost_ratios(rows, as_in_paper=True)[0]  # which the paper did not measure
    of_run = selfcon.analyze.cost(runs / "selfcon", methods=["selfcon"], batch_sizes=[4], steps=1, device="cpu")
    assert of_run["width"] == 0.125
    assert find_costs([runs / "selfcon"]) == {}  # a narrow network is not the paper's


def test_the_cost_of_a_run_is_of_its_own_network(runs: Path, tmp_path: Path) -> None:
    odd: dict[str, Any] = {"stem": "large", "norm": "group", "projection_dim": 32, "image_size": 32, "epochs": 1}
    asked = {
        **SMALL,
        **odd,
        "model_options": {"block_args": {"attn_layer": "se"}},
        "limit_batches": 1,
        "probe.epochs": 1,
    }
    for method in ("ce", "selfcon"):
        selfcon.fit(data=str(runs / "stripes.npz"), method=method, out=tmp_path / method, **asked)
        run = open_run(tmp_path / method, "cpu")
        if method == "selfcon":
            run.net.classifiers.clear()  # no part of a step: the probe trains them
        arithmetic = count_multiply_adds(run.net, zero_image(run.net, 32))
        expected = sum(each.numel() for each in run.net.parameters()), arithmetic
        found = selfcon.analyze.cost(run.path, methods=[method], batch_sizes=[8], steps=1, device="cpu")
        assert [(row["parameters"], row["multiply_adds"]) for row in found["rows"]] == [expected]
        told = {"stem": "large", "norm": "group", "projection_dim": 32, "block_args": {"attn_layer": "se"}}
        assert found["network"] == told
    usual = selfcon.analyze.cost(
        run.path, models=["wrn16_8"], methods=["ce"], batch_sizes=[8], steps=1, out=tmp_path, device="cpu"
    )
    assert usual["network"] == {}
    saved = json.loads((tmp_path / "ce" / "analysis" / "cost.json").read_text())
    (tmp_path / "ce" / "analysis" / "cost.json").write_text(json.dumps({**saved, "width": 1.0}))
    assert find_costs([tmp_path / "ce"]) == {}  # another stem is not the paper's


def test_information_fills_its_cells(runs: Path, tmp_path: Path) -> None:
    cell = next(
        cell
        for cell in get_exhibit("T17").cells
        if cell.made_by and cell.condition["method"] == "selfcon" and cell.condition["estimator"] == "nwj"
    )
    (found,) = find_runs([runs])[identify(selfcon_settings(runs / "selfcon"))]
    folder = tmp_path / "run"
    (folder / "analysis").mkdir(parents=True)
    assert found_in(found.folder, cell) is None
    estimates = [{"between": cell.condition["between"], "estimator": "nwj", "nats": 1.5}]
    (folder / "analysis" / "information.json").write_text(json.dumps({"runs": [{"estimates": estimates}]}))
    assert found_in(folder, cell) == 1.5
    assert cell.runs  # `reproduce run T17` trains what it is measured on


def selfcon_settings(folder: Path) -> Settings:
    return make_settings(read_yaml(folder / "config.yaml"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bounds", "--draws", "20", "--out", "b"], r"proposition 1 +holds in 20 of 20"),
        (["gradients", "selfcon", "--batch-size", "16"], r"stem +[\d.]+ +[\d.]+ +[\d.]+\n +1 "),
        (["gradcam", "selfcon", "--images", "2"], r"through exit2 "),
        (["generalization", "supcon", "selfcon", "--out", "g"], r"supcon \(supcon\) +[\d.]+ +[\d.]+ +-?[\d.]+\n"),
        (["embedding", "selfcon"], r"nearest to image 0 \("),
        (["cost", "selfcon", "--steps", "1", "--batch-sizes", "4"], r"selfcon / supcon, resnet18 16 px batch 4: time"),
        (
            ["information", "selfcon", "--pairs", "y,T", "--seeds", "1", "--steps", "10"],
            r"I\(y; T\)  nwj +-?[\d.]+\n",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_verbs(
    words: list[str], says: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs)
    assert command(["analyze", *words]) == 0
    said = capsys.readouterr().out
    assert re.search(says, said), said
    assert "drawn in" in said
    assert command(["analyze", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["information", "nowhere"], 66, "no folder nowhere"),
        (["information", "selfcon", "--pairs", "x,Q"], 64, "two of x, y, T and F"),
        (["information", "selfcon", "--estimators", "mime"], 64, "mine"),
        (["information", "selfcon", "--samples", "100"], 65, "too few to estimate"),
        (["information", "selfcon", "--after", "9"], 64, "stages 1 to 4"),
        (["embedding", "selfcon", "--split", "dev"], 64, "no split 'dev'"),
        (["embedding", "selfcon", "--map", "pca"], 64, "tsne or umap"),
        (["gradients", "selfcon", "--methods", "ce,sd"], 64, "not contrastive"),
        (["cost", "--batch-sizes", "many"], 64, "whole numbers such as"),
        (["cost", "--models", "resnot18"], 64, "resnet18"),
        (["gradcam"], 64, "required"),
        (["heatmap"], 64, "Unknown verb after analyze"),
        (["gradients", "selfcon", "--methods", "supcon,supcon"], 64, "Two methods are compared"),
        (["cost", "selfcon", "--steps", "0"], 64, "At least 1 step"),
        (["cost", "selfcon", "--methods", ""], 64, "at least one method"),
        (["gradcam", "selfcon", "--methods", ""], 64, "at least one method"),
        (["embedding", "selfcon", "--samples", "-5"], 64, "At least 1 sample"),
        (["embedding", "selfcon", "--count", "-1"], 64, "At least 1"),
        (["bounds", "--temperature", "0.001"], 64, "at least 0.02"),
        (["information", "selfcon", "--after", "0"], 64, "stages 1 to 4"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    words: list[str], code: int, says: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    with pytest.raises(SelfconError, match=says) as told:
        command(["analyze", *words])
    assert told.value.exit_code == code


def test_one_class_and_places_that_cannot_be_written(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        selfcon.analyze.bounds(draws=1, out=runs / "stripes.npz" / "below")
    with pytest.raises(DataError, match="of one class"):
        _some_of_each_class(torch.zeros(9).long(), 3)


def test_colours_are_steady() -> None:
    names = ["ce", "supcon", "supcon-s", "selfcon", "selfcon-m"]
    assert len({colour_of_method(name) for name in names}) == len(names)
    assert len({colour_of_exit(name) for name in ("backbone", "exit1", "exit2", "exit3", "ensemble")}) == 5
    assert colour_of_method("something-of-mine") == "#E69F00"


def test_the_page_about_analyses() -> None:
    page = (Path(__file__).parents[2] / "docs" / "analyses.md").read_text()
    for picture in re.findall(r"\]\((pictures/\S+)\)", page):
        assert (Path(__file__).parents[2] / "docs" / picture).is_file()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    said: dict[str, Any] = {}
    exec(code, said)
    assert float(said["found"]) == pytest.approx(1.39, rel=0.15)
    for verb in re.findall(r"^selfcon (analyze \w+)", page, re.MULTILINE):
        assert verb in VERBS
