"""The package as a user meets it: cheap to import, complete, typed, and its README true."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import selfcon
import selfcon.losses
from selfcon import workflows
from tests.cli.calling import call

ROOT = Path(__file__).parents[1]
PACKAGES = ("selfcon", "selfcon.analysis", "selfcon.data", "selfcon.workflows")  # whose modules are public names


NAMES = "import selfcon; selfcon.list_methods(); selfcon.get_method('selfcon').views; dir(selfcon)"
MISTAKES = """
from selfcon.cli.main import run
from selfcon.errors import UsageError
import selfcon.losses.sets
try:
    run(['fit', '--epochz', '3', '--exits', 'two', '--augment.policy', 'nosuch'])
except UsageError as error:
    assert all(word in str(error) for word in ('epochz', 'two', 'nosuch'))
else:
    raise SystemExit('not refused')
"""


@pytest.mark.medium
@pytest.mark.parametrize("code", [NAMES, MISTAKES], ids=["names", "mistakes"])
def test_what_needs_no_torch_does_not_import_it(code: str) -> None:
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "selfcon.losses.sets" in imported
    heavy = {name for name in imported if name.partition(".")[0] in {"torch", "timm", "numpy", "sklearn"}}
    assert heavy == set()


@pytest.mark.parametrize(
    "package",
    [selfcon, selfcon.losses, selfcon.data, selfcon.networks, selfcon.analysis, workflows],
    ids=lambda package: package.__name__,
)
def test_lazy_names_are_those_that_type_checkers_see(package: object) -> None:
    source = Path(package.__file__).read_text()  # type: ignore[attr-defined]
    typed = {
        alias.name: f"{node.module}.{alias.name}" if node.module in PACKAGES else node.module
        for block in ast.parse(source).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == package._NAMES  # type: ignore[attr-defined]
    assert set(typed) <= set(dir(package))
    for name in typed:
        public = getattr(package, name)
        assert isinstance(public, str) or public.__name__.rpartition(".")[-1] == name
        assert getattr(package, name) is public, "whatever was imported meanwhile"


def test_the_licence_travels_with_the_package() -> None:
    from importlib.metadata import metadata

    assert metadata("selfcon")["License-Expression"] == "MIT"
    assert metadata("selfcon").get_all("License-File") == ["LICENSE"]


def test_a_misspelt_name_gets_a_hint() -> None:
    with pytest.raises(AttributeError, match="did you mean 'create_model'"):
        selfcon.create_modle  # noqa: B018
    assert not hasattr(selfcon, "_private")


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert version("selfcon") == selfcon.__version__


def test_extras_are_named_as_they_can_be_had() -> None:
    """From the folder: the package is on no index, where somebody else might take its name."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    places = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = [each for place in places for each in re.findall(r"pip install '(.*?)'", place.read_text())]
    assert len(named) > 10
    for each in named:
        found = re.fullmatch(r"\.\[([a-z,]+)\]", each)
        assert set(found[1].split(",") if found else [each]) <= set(extras)


@pytest.mark.medium
def test_the_example_of_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-W", "error", "-c", block], check=True, timeout=600, cwd=ROOT)


@pytest.mark.slow
def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    """Run every command as printed, with less work: the last value of an option counts."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 10)):
        for label, name in enumerate(("owl", "wren", "heron")):
            directory = tmp_path / "photos" / split / name
            directory.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 150, (40, 50, 3)) + 50 * label
                Image.fromarray(pixels.astype(np.uint8)).save(directory / f"{number}.jpg")
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) == 5
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "selfcon"
        less = ["--width", "0.125", "--epochs", "1", "--image-size", "16"] if arguments[0] == "fit" else []
        done = call(*arguments, *less, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    assert (tmp_path / "runs" / "photos" / "report.html").is_file()


def test_make_demo_runs_the_main_job() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "selfcon fit --out runs/demo" in makefile


@pytest.mark.slow
def test_the_demo_learns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "selfcon", "fit", "--out", str(tmp_path / "demo"), "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=900,
        cwd=ROOT,
    )
    assert json.loads(done.stdout)["accuracy"]["ensemble"]["top1"] >= 97


@pytest.mark.slow
def test_the_example_runs() -> None:
    subprocess.run([sys.executable, "examples/digits.py", "--epochs", "1"], check=True, timeout=600, cwd=ROOT)
