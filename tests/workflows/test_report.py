"""One page for one run or many, from their folders alone."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import selfcon
from selfcon.cli.results import accuracy_lines
from selfcon.config import flatten, make_settings
from selfcon.errors import DataError, InputMissingError, UsageError
from selfcon.evaluation.accuracy import Predictions
from selfcon.report.evidence import gather
from selfcon.report.page import RunPage, render, tabulate_runs, tabulate_seeds
from selfcon.report.plots import sort_answers
from selfcon.training.files import write_whole
from selfcon.workflows.reporting import read_page, write_report
from selfcon.workflows.settings import collect_settings
from tests.cli.calling import call
from tests.workflows.conftest import write_stripes

SMALL: dict[str, Any] = {"width": 0.125, "epochs": 2, "batch_size": 32, "probe.epochs": 4, "device": "cpu"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of two methods, whose data are gone."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_stripes(folder / "stripes.npz")
    for method in ("selfcon", "supcon"):
        selfcon.fit(data=str(data), out=folder / method, method=method, **SMALL)
    selfcon.calibrate(folder / "selfcon", within=1, device="cpu")
    data.unlink()
    return folder


def test_a_page_needs_nothing_but_the_folder(runs: Path, tmp_path: Path) -> None:
    before = (runs / "supcon" / "report.html").read_text()
    assert write_report([runs / "supcon"], out=tmp_path / "again.html") == tmp_path / "again.html"
    assert (tmp_path / "again.html").read_text() == before
    page = write_report([runs / "selfcon"], out=tmp_path / "one.html").read_text()
    there = "Where each exit puts 36 test images (PCA)"
    for words in ("How far to believe it", "Answering early", "data:image/svg+xml", there, "PCA map"):
        assert words in page
    assert "t-SNE map:" not in page
    assert "Answering early" not in before


def test_what_other_verbs_left_is_shown(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "selfcon", run)
    for name in ("classify-birds-0", "segment-voc-encoder-0"):
        (run / "transfer" / name).mkdir(parents=True)
    linear = {"accuracy": {"backbone": {"top1": 61.25}, "exit2": {"top1": 60.0}, "ensemble": {"top1": 63.5}}}
    classified = {"method": "selfcon", "metric": "top1", "linear": linear}
    (run / "transfer" / "classify-birds-0" / "classify.json").write_text(json.dumps(classified))
    segmented = {"task": "segment", "method": "selfcon", "data": "voc", "miou": 17.75}
    (run / "transfer" / "segment-voc-encoder-0" / "results.json").write_text(json.dumps(segmented))
    each = {"mean_error": 44.4, "relative_error": 12.3}
    errors = {"backbone": {"fog": [33.0, 35.0], "contrast": [34.0, 36.0]}}
    corrupted = {"clean_error": {"backbone": 32.1}, "summary": {"backbone": each}}
    corrupted |= {"errors": errors, "severities": [1, 2], "images": 1500}
    (run / "transfer" / "corruption.json").write_text(json.dumps(corrupted))
    sections = {section.title: section for section in read_page(run).sections}
    assert sections["Other classes"].table.rows == [["classify-birds-0", "selfcon", "linear", 61.25, 63.5]]  # type: ignore[union-attr]
    assert sections["Scenes"].table.rows[0][-2:] == ["miou", 17.75]  # type: ignore[union-attr]
    assert sections["Corrupted images"].table.rows == [["backbone", 32.1, 44.4, 12.3]]  # type: ignore[union-attr]
    assert sections["Corrupted images"].text.startswith("2 corruptions at 2 severities of 1,500 images")
    assert "44.4" in write_report([run]).read_text()


def test_tables_as_json(runs: Path, tmp_path: Path) -> None:
    done = call("report", runs / "selfcon", runs / "supcon", "--out", tmp_path / "both.html", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert [row["method"] for row in told["runs"]] == ["selfcon", "supcon"]
    results = json.loads((runs / "supcon" / "results.json").read_text())
    assert told["runs"][1]["backbone"] == results["accuracy"]["backbone"]["top1"]
    assert told["seeds"][1]["accuracy"]["backbone"] == {"mean": told["runs"][1]["backbone"], "std": None}
    assert "seed" not in told["seeds"][0]["settings"]


def test_many_runs_on_one_page(runs: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(runs / "supcon", hostile)
    done = call("report", runs / "selfcon", hostile, "--out", tmp_path / "both.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    header, first, second, same, _, told = done.stdout.splitlines()
    assert header.split()[:5] == ["run", "method", "backbone", "exit2", "ensemble"]
    accuracy = json.loads((runs / "selfcon" / "results.json").read_text())["accuracy"]
    assert first.split()[:5] == ["selfcon", "selfcon", *(f"{values['top1']:.1f}" for values in accuracy.values())]
    assert second.startswith(f"{hostile.name}    supcon")
    assert same.startswith("The same in all runs: epochs 2, seed 0, network resnet18")
    assert told == f"Report: {tmp_path / 'both.html'}"
    page = (tmp_path / "both.html").read_text()
    assert "<img src=x" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert page.count("<section ") == 2
    assert "network resnet18, width 0.125, data stripes.npz" in re.sub(r"data \S*/", "data ", page)
    assert ">network<" not in page


def test_runs_that_differ_in_their_seed_are_taken_together(runs: Path, tmp_path: Path) -> None:
    numbers = {"selfcon": (70.0, 71.0, 75.0), "supcon": (66.0,)}
    for method, values in numbers.items():
        for seed, value in enumerate(values):
            run = tmp_path / f"{method}-{seed}"
            shutil.copytree(runs / method, run)
            config = (run / "config.yaml").read_text()
            assert "seed: 0\n" in config
            (run / "config.yaml").write_text(config.replace("seed: 0\n", f"seed: {seed}\n"))
            result = json.loads((run / "results.json").read_text())
            result["accuracy"]["backbone"]["top1"] = value
            (run / "results.json").write_text(json.dumps(result))
    done = call("report", *(str(path) for path in sorted(tmp_path.iterdir())), "--out", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *every, _, header, first, second, _, told = done.stdout.splitlines()
    assert [line.split()[0] for line in every[1:5]] == ["selfcon-0", "selfcon-1", "selfcon-2", "supcon-0"]
    assert header.split()[:2] == ["method", "backbone"]
    assert header.split()[-1] == "seeds"
    assert first.startswith("selfcon   72.0 ± 2.6")
    assert first.endswith(" 3")
    assert second.split()[:2] == ["supcon", "66.0"]
    assert second.endswith(" 1")
    assert told == "Report: page.html"
    assert "72.0 ± 2.6" in (tmp_path / "page.html").read_text()
    assert "Over seeds" not in write_report([runs / "selfcon", runs / "supcon"], out=tmp_path / "two.html").read_text()


def test_only_seeds_are_taken_together() -> None:
    def page(top1: float, seed: int, **given: Any) -> RunPage:
        settings = flatten(make_settings({**given, "seed": seed}).model_dump(mode="json"))
        accuracy = {name: {"top1": top1, "train_top1": 1.0} for name in ("backbone", "exit2", "ensemble")}
        return RunPage(name="run", settings=settings, metrics=[], result={"accuracy": accuracy})

    table = tabulate_seeds([page(70 - 20 * narrow, seed, width=1 - narrow / 2) for seed in (0, 1) for narrow in (0, 1)])
    assert table is not None
    assert table.header[:2] == ["method", "width"]
    assert [list(row[:3]) for row in table.rows] == [["selfcon", "1.0", "70.0 ± 0.0"], ["selfcon", "0.5", "50.0 ± 0.0"]]
    imagenet = [page(70, 0, class_list="A.txt"), page(72, 1, class_list="A.txt"), page(90, 0, class_list="B.txt")]
    table = tabulate_seeds(imagenet)
    assert table is not None
    assert [row[-1] for row in table.rows] == [2, 1]


def test_of_one_exit_there_is_no_ensemble(runs: Path, tmp_path: Path) -> None:
    found = [json.loads((runs / name / "results.json").read_text())["accuracy"] for name in ("supcon", "selfcon")]
    one, two = found
    assert [line.split()[0] for line in accuracy_lines(one)[1:]] == ["backbone"]
    assert [line.split()[0] for line in accuracy_lines(two)[1:]] == ["backbone", "exit2", "ensemble"]
    page = write_report([runs / "supcon"], out=tmp_path / "one.html").read_text()
    assert "<td>backbone</td>" in page
    assert "<td>ensemble</td>" not in page
    assert "<td>ensemble</td>" in write_report([runs / "selfcon"], out=tmp_path / "two.html").read_text()


def test_a_report_of_a_network_with_one_exit_does_not_mention_an_ensemble(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "supcon", run)
    result = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps({**result, "never_guessed": ["rows"]}))
    (run / "transfer" / "classify-birds-0").mkdir(parents=True)
    both = {"backbone": {"top1": 61.25}, "ensemble": {"top1": 61.25}}
    classified = {"method": "supcon", "metric": "top1", "linear": {"accuracy": both}}
    (run / "transfer" / "classify-birds-0" / "classify.json").write_text(json.dumps(classified))
    errors = {"clean_error": {"backbone": 32.1}, "errors": {"backbone": {"fog": [33.0]}}, "severities": [1]}
    corrupted = {**errors, "images": 36, "summary": {name: {"mean_error": 44.4} for name in both}}
    (run / "transfer" / "corruption.json").write_text(json.dumps(corrupted))
    page = re.sub(r'"data:[^"]*"', "", write_report([run]).read_text())
    assert "ensemble" not in page
    assert "Never predicted by the backbone: rows." in page
    assert "61.2" in page
    assert "44.4" in page


def test_settings_show_the_learning_rate_that_was_used(runs: Path, tmp_path: Path) -> None:
    page = write_report([runs / "selfcon"], out=tmp_path / "one.html").read_text()
    assert "<tr><td>lr</td><td>0.003</td></tr>" in page


@pytest.mark.parametrize(("samples", "by"), [(29_999, "pca"), (30_000, "tsne")])
def test_an_exit_whose_features_are_one_point_has_no_map(samples: int, by: str) -> None:
    labels, points = torch.arange(40) % 2, torch.randn(40, 8)
    said = Predictions({"ensemble": torch.nn.functional.one_hot(labels).float()}, labels)
    collapsed = {"exit1": torch.full((40, 8), 0.3), "exit2": torch.zeros(40, 8), "exit3": points * torch.nan}
    found = gather(
        said,
        {"backbone": points, **collapsed},
        pictures=lambda rows: torch.zeros(len(rows), 3, 4, 4, dtype=torch.uint8),
        describe=str,
        classes=("a", "b"),
        seed=0,
        samples=samples,
    )
    assert list(found["maps"]) == ["backbone"]
    assert found["map"] == by


def test_exits_stand_in_the_order_of_their_stages() -> None:
    order = ["backbone", "exit2", "exit10", "exit12", "ensemble"]
    assert sort_answers(reversed(order)) == order


def test_what_differs_has_a_column(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "selfcon", tmp_path / "colder")
    config = tmp_path / "colder" / "config.yaml"
    settings = selfcon.config.make_settings(selfcon.config.read_yaml(config), {"loss.temperature": 0.07})
    config.write_text(selfcon.config.write_yaml(settings))
    page = write_report([runs / "selfcon", tmp_path / "colder"], out=tmp_path / "both.html").read_text()
    assert '<button type="button">loss.temperature</button>' in page
    assert "loss.alpha</button>" not in page


def test_numbers_are_sorted_as_numbers_and_shown_whole() -> None:
    def page(top1: float, **given: Any) -> RunPage:
        settings = flatten(make_settings(given).model_dump(mode="json"))
        accuracy = {"ensemble": {"top1": top1, "train_top1": 1.0}, "backbone": {"top1": top1, "train_top1": 1.0}}
        result = {
            "accuracy": accuracy,
            "images_per_second": 1.0,
            "seconds": 60.0,
            "peak_memory_bytes": 1,
            "device": "x",
        }
        result |= {"model": "resnet18", "epochs": 1, "seed": 0}
        return RunPage(name=f"run {top1}", settings=settings, metrics=[], result=result)

    few = page(9.25, lr=0.001, batch_size=1024, stem="large", **{"probe.weight_decay": 1e-05})
    pages = [few, page(10.25, lr=0.5, batch_size=64, norm="group")]
    table = tabulate_runs(pages)
    found = {name: [row[place] for row in table.rows] for place, name in enumerate(table.header)}
    assert (found["lr"], found["batch_size"], found["stem"]) == ([0.001, 0.5], [1024, 64], ["large", ""])
    shown = re.sub(r"\s+", " ", render(pages))
    for cell in ('"0.001">0.001', '"1024">1024', '"64">64', '"1e-05">1e-05', '"9.25">9.2', '"10.25">10.2', ">large"):
        assert f"{cell}</td>" in shown, cell


def test_the_papers_number_stands_beside_ours(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "selfcon", run)
    settings = collect_settings("cifar100-resnet18-selfcon", {"epochs": 200})
    (run / "config.yaml").write_text(selfcon.config.write_yaml(settings))
    assert read_page(run).paper["backbone"].startswith("75.4")
    assert "1000 epochs" in read_page(run).paper["backbone"]
    assert read_page(runs / "selfcon").paper == {}
    kept = collect_settings("cifar100-resnet18-selfcon", {"epochs": 300, "keep_epochs": [300]})
    (run / "config.yaml").write_text(selfcon.config.write_yaml(kept))
    assert read_page(run).paper["ensemble"].startswith("77.4")
    ours = collect_settings("cifar100-resnet18-best", {})
    (run / "config.yaml").write_text(selfcon.config.write_yaml(ours))
    assert read_page(run).paper == {}  # which the paper did not run
    large = collect_settings("imagenet100-resnet18-selfcon", {"epochs": 100})
    (run / "config.yaml").write_text(selfcon.config.write_yaml(large))
    assert "400 epochs" in read_page(run).paper["backbone"]


def test_a_run_under_way_is_followed(runs: Path, tmp_path: Path) -> None:
    run, seen = tmp_path / "run", []
    shutil.copytree(runs / "selfcon", run)
    later = {name: (run / name).read_text() for name in ("results.json", "evidence.json")}
    for name in later:
        (run / name).unlink()

    def finish() -> None:
        time.sleep(1.5)
        for name in ("evidence.json", "results.json"):
            write_whole(run / name, later[name].encode())

    thread = threading.Thread(target=finish)
    thread.start()
    path = write_report([run], watch=1, after_each=lambda path, pages: seen.append(path.read_text()))
    thread.join()
    assert len(seen) >= 2
    assert 'http-equiv="refresh" content="1"' in seen[0]
    assert "probe: epoch 4 of 4, loss" in seen[0]
    assert "refresh" not in path.read_text()
    assert "under way" not in path.read_text()
    assert "Where each exit puts" in path.read_text()


def test_what_is_no_run_is_left_out_of_many(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.html").write_text("a page of before")
    page = write_report([tmp_path / "old.html", tmp_path, runs / "selfcon"], out=tmp_path / "new.html").read_text()
    assert page.count("<section ") == 1
    assert "left out, since they hold no run" in capsys.readouterr().err


def test_a_folder_of_runs_is_all_of_them(runs: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        shutil.copytree(runs / "selfcon", tmp_path / "seeds" / f"seed-{seed}")
    page = write_report(tmp_path / "seeds")  # type: ignore[arg-type]
    assert page == tmp_path / "seeds" / "report.html"
    assert page.read_text().count("<section ") == 2
    write_report([tmp_path / "seeds", tmp_path / "seeds" / "seed-0"], out=page)
    assert page.read_text().count("<section ") == 2


def test_runs_of_the_same_name_are_told_apart_by_their_parent_directories(runs: Path, tmp_path: Path) -> None:
    for folder in ("a/one", "b/one", "b/two"):
        for seed in (0, 1):
            shutil.copytree(runs / "selfcon", tmp_path / folder / f"seed-{seed}")
    shutil.copytree(runs / "supcon", tmp_path / "supcon")
    seen: list[str] = []
    folders = [tmp_path / "a" / "one", tmp_path / "b" / "one", tmp_path / "b" / "two", tmp_path / "supcon"]
    write_report(
        folders, out=tmp_path / "all.html", after_each=lambda _, pages: seen.extend(page.name for page in pages)
    )
    names = ["a/one/seed-0", "a/one/seed-1", "b/one/seed-0", "b/one/seed-1", "two/seed-0", "two/seed-1", "supcon"]
    assert seen == names


def test_an_encoder_that_is_probed_is_under_way(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "selfcon", run)
    result = json.loads((run / "results.json").read_text())
    del result["accuracy"]
    (run / "results.json").write_text(json.dumps(result))
    assert not read_page(run).done
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"pretrain"' in line]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert read_page(run).done


def test_folders_that_cannot_be_shown(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputMissingError, match="holds no run"):
        write_report([tmp_path])
    with pytest.raises(UsageError, match="at least 1"):
        write_report([runs / "selfcon"], watch=0.0)
    for name, text, words in (
        ("results.json", "{", "cannot be read"),
        ("results.json", "[]", "names and values"),
        ("results.json", '{"accuracy": {"backbone": {"top1": "much"}}}', "not those of a run"),
        ("evidence.json", '{"tested": 1}', "not those of a run"),
        ("metrics.jsonl", '{"stage": 1}', "not those of a run"),
        ("metrics.jsonl", '{"stage": "a", "epoch": 1, "loss": "x", "seconds": 1}', "not those of a run"),
        ("evidence.json", "[" * 100_000, "cannot be read"),
        ("analysis/calibration.json", '{"answers": 5}', "not what our verbs write"),
    ):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(runs / "selfcon", run)
        (run / name).write_text(text)
        with pytest.raises(DataError, match=words):
            write_report([run])
