"""The verbs that train, as a user runs them: same bytes twice, stopped and gone on with, mistakes in a sentence."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from selfcon.cli.main import main
from selfcon.cli.meanings import MEANINGS
from selfcon.cli.settings import FLAGS, parse_value
from selfcon.config import NAMES, Settings, choices_of_settings
from selfcon.losses.methods import list_methods
from tests.cli.calling import call, run
from tests.workflows.conftest import write_stripes

COMMAND = ["fit", "--data", "stripes.npz", "--width", "0.125", "--epochs", "3", "--batch-size", "8", "--device", "cpu"]
COMMAND += ["--probe.epochs", "2", "--watch.knn_every", "2"]


def test_the_defaults_that_help_tells_are_those() -> None:
    told = {setting: re.search(r"default: ([^ )]+)\)", text) for setting, _, text in FLAGS.values()}
    found = {setting: match[1] for setting, match in told.items() if match}
    assert found == {setting: str(getattr(Settings(), setting)) for setting in found}
    assert {"model", "method", "epochs", "batch_size", "exits"} <= set(found)


def test_runs_side_by_side_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, expected in (({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)):
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in asked.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            main(["--version"])
        assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_the_first_of_several_processes_has_time_to_say_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for rank, expected in (("0", []), ("1", [10.0])):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as left:
            main(["fit", "--epoch", "3"])
        assert (left.value.code, waited) == (64, expected)


def test_several_seeds_are_runs_beside_each_other(place: Path) -> None:
    command = [*COMMAND, "--epochs", "1", "--out", "runs"]
    done = call(*command, "--seed", "3,5", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [each["seed"] for each in told["runs"]] == [3, 5]
    assert told["seeds"][0]["seeds"] == 2
    assert (place / "runs" / "report.html").exists()
    again = call(*command, "--seed", "3,5", cwd=place)
    assert again.stdout.count("is done already") == 2
    assert "±" in again.stdout
    alone = call(*command[:-1], "alone", "--seed", "5", "--json", cwd=place)
    assert json.loads(alone.stdout)["accuracy"]["ensemble"]["top1"] == told["runs"][1]["ensemble"]
    wrong = call(*command, "--seed", "3,-1", cwd=place)
    assert (wrong.returncode, "seed" in wrong.stderr) == (64, True)


def test_several_seeds_in_a_run_with_one_seed_are_an_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "config.yaml").touch()
    done = call("fit", "--out", "runs", "--seed", "0,1", cwd=tmp_path)
    assert done.returncode == 64
    assert "but runs with several seeds are stored in subdirectories such as runs/seed-0. Choose another" in done.stderr


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_stripes(tmp_path / "stripes.npz", train=240)
    return tmp_path


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.mark.slow
def test_twice_the_same_and_stopped_in_between(place: Path) -> None:
    for name, do in (("a", run), ("b", call)):
        done = do(*COMMAND, "--out", name, "--json", cwd=place)
        assert done.returncode == 0, done.stderr
    assert metrics(place / "a") == metrics(place / "b")
    weights = (place / "a" / "model.safetensors").read_bytes()
    assert (place / "b" / "model.safetensors").read_bytes() == weights
    assert (place / "a" / "model.json").read_text() == (place / "b" / "model.json").read_text()

    # Stopped by SIGTERM in the middle of an epoch, twice, it ends with the same bytes.
    middles = 0
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-m", "selfcon", *COMMAND, "--out", "c"], cwd=place, stderr=subprocess.PIPE, text=True
        )
        seen = len(metrics(place / "c")) if (place / "c" / "metrics.jsonl").exists() else 0
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if (place / "c" / "metrics.jsonl").exists() and len(metrics(place / "c")) > seen:
                break
            time.sleep(0.01)
        time.sleep(0.15)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        if process.returncode == 0:
            break
        assert process.returncode == 75, errors
        assert "Stopped by SIGTERM; the same command goes on from here." in errors
        for state in (place / "c" / "checkpoints").glob("*/*/state.json"):
            middles += json.loads(state.read_text())["batch"] > 0
    assert middles > 0
    done = call(*COMMAND, "--out", "c", cwd=place)
    assert done.returncode == 0, done.stderr
    assert (place / "c" / "model.safetensors").read_bytes() == weights
    assert metrics(place / "c") == metrics(place / "a")


def test_what_a_user_reads(place: Path) -> None:
    done = call(*COMMAND, "--keep-epochs", "2", "--out", "x", cwd=place)
    assert done.returncode == 0
    assert "accuracy, %" in done.stdout
    assert "ensemble" in done.stdout
    assert "Report: x/report.html" in done.stdout
    assert (place / "x" / "encoders" / "epoch-0002.safetensors").is_file()
    assert "x is done already" in call(*COMMAND, "--keep-epochs=[2]", "--out", "x", cwd=place).stdout
    for verb in ("evaluate", "knn"):
        done = call(verb, "x", "--json", cwd=place)
        assert done.returncode == 0, done.stderr
        assert "backbone" in json.loads(done.stdout)["accuracy"]
    done = call("doctor", "--data", "stripes.npz", "--width", "0.125", cwd=place)
    assert "positives of an anchor" in done.stdout


@pytest.mark.parametrize(
    "images",
    [pytest.param(40, marks=pytest.mark.slow, id="several batches"), pytest.param(12, id="less than one")],
)
def test_bench(images: int, tmp_path: Path) -> None:
    small = ["--width", "0.125", "--images", str(images), "--batch-size", "16", "--image-size", "16", "--epochs", "1"]
    done = run("bench", *small, "--workers", "1", "--methods", "supcon", "--device", "cpu", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["what"] for row in rows if row["what"] != "augmentation"] == [
        "machine",
        "released code's manner",
        "step",
        "epoch",
        "probe",
    ]
    assert all(row["images_per_second"] > 0 for row in rows if "images_per_second" in row)
    step = next(row for row in rows if row["what"] == "step")
    assert 0 < step["share_of_matrix_rate"] < 1
    assert "epoch resnet18 supcon" in done.stderr
    assert call("bench", "--methods", "supconn", cwd=tmp_path).returncode == 64


RECIPE = "cifar100-resnet18-selfcon"


def test_every_setting_has_a_meaning() -> None:
    assert set(MEANINGS) == {*NAMES} - {"model_options"}
    assert MEANINGS["method"].split(", ") == list_methods()
    assert choices_of_settings()["stem"] == ("small", "small-pool", "large")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5,1.0", [0.5, 1.0]),
        ("[0.5, 1.0]", [0.5, 1.0]),
        ("10,20", [10, 20]),
        ("1e-4", 1e-4),
        ("7", 7),
        ("true", True),
        ("null", None),
        ("2:fc,3:fc", "2:fc,3:fc"),
        ("{", "{"),
    ],
)
def test_values_are_read_as_they_are_meant(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_what_one_of_several_processes_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.npz").write_bytes(b"nothing")
    monkeypatch.setenv("RANK", "1")
    for path, words in ((tmp_path / "broken.npz", "selfcon: process 1: "), (tmp_path / "gone.npz", "")):
        with pytest.raises(SystemExit):
            main(["data", "check", str(path)])
        found = capsys.readouterr()
        assert (found.out, found.err[: len(words)]) == ("", words)
        assert bool(found.err) == bool(words)  # what all of them meet, the first one tells


@pytest.mark.parametrize("verb", ["fit", "pretrain", "probe", "train", "evaluate", "knn", "doctor", "recipes", "bench"])
def test_help_fits_a_screen_and_shows_an_example(verb: str, tmp_path: Path) -> None:
    done = run(verb, "--help", cwd=tmp_path, COLUMNS="120")
    assert done.returncode == 0
    assert f"example: selfcon {verb}" in done.stdout
    assert len(done.stdout.splitlines()) <= 40
    if verb in ("fit", "doctor"):
        everything = call(verb, "--help-all", cwd=tmp_path).stdout
        assert (
            "--epochs                        1000 " in call(verb, "--recipe", RECIPE, "--help-all", cwd=tmp_path).stdout
        )
        assert "--optim.momentum" in everything
        assert "--batch-size" in everything


def test_selfcon_help_is_quick(tmp_path: Path) -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run("--help", cwd=tmp_path)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.7


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["fit", "--epoch", "3"], 64, "did you mean '--epochs'"),
        (["fit", "--optim.momentun", "3"], 64, "did you mean '--optim.momentum'"),
        (["fit", "--config", "x.yaml"], 64, "did you mean '--recipe'"),
        (["fit", "--optim.momentum"], 64, "--optim.momentum needs a value"),
        (["fit", "--epochs", "many"], 64, "epochs should be a valid integer"),
        (["fit", "--epochs", "many", "--lrr=3", "--width", "nan", "word"], 64, "did you mean '--lr'? No option takes"),
        (["fit", "--epochs", "0", "--lr", "nan", "--method", "selfconn"], 64, "did you mean 'selfcon'"),
        (["fit", "--recipe", "cifar-resnet18-selfcon"], 64, "Unknown recipe"),
        (["fit", "--data", "nowhere/x.npz"], 66, "There is no file or folder nowhere/x.npz"),
        (["fit", "--exits", "7:fc"], 64, "valid stages: 1, 2, 3"),
        (["fit", "--out", "/proc/x"], 74, "cannot be written"),
        (["fit", "digits"], 64, "No option takes the word 'digits'"),
        (["evaluate", "nothing"], 66, "There is no folder nothing"),
        (["probe", "nothing"], 66, "holds no run"),
        (["fit", "--method", "ce", "--loss.learn_temperature", "true"], 64, "no temperature to learn"),
        (["fit", "--optim.nesterov", "true"], 64, "nesterov goes with sgd"),
        (["fti"], 64, "did you mean 'fit'"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    done = call(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
