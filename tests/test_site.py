"""The documents: every link leads somewhere, the site builds, the notebook runs."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def load_maker() -> Any:
    found = importlib.util.spec_from_file_location("make_site", ROOT / "docs" / "make.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_links_lead_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = load_maker()
    monkeypatch.setattr(maker, "PAGES", tmp_path / "pages")
    pages = maker.gather()
    assert len(pages) > 15
    for page in pages:
        for _, _, target in maker._LINK.findall(page.read_text()):
            assert (page.parent / target.partition("#")[0]).exists(), (page, target)
    listed = re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text())
    assert sorted(listed) == sorted(str(page.relative_to(tmp_path / "pages")) for page in pages)
    first = (tmp_path / "pages" / "index.md").read_text()
    assert "(docs/" not in first


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = load_maker()
    for name in ("docs", "results"):
        (tmp_path / name).mkdir()
    for name in ("README.md", *maker._TOP):
        (tmp_path / name).write_text("[a page](docs/nowhere.md)\n")
    monkeypatch.setattr(maker, "ROOT", tmp_path)
    monkeypatch.setattr(maker, "PAGES", tmp_path / "pages")
    with pytest.raises(SystemExit, match=r"links to docs/nowhere\.md"):
        maker.gather()


@pytest.mark.medium
@pytest.mark.skipif(
    shutil.which("zensical", path=str(Path(sys.executable).parent)) is None, reason="zensical is not installed"
)
def test_the_site_builds(tmp_path: Path) -> None:
    for name in ("docs", "results", "src"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "zensical.toml", "examples"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    for name in ("LICENSE", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run(
        [sys.executable, "docs/make.py"],
        cwd=tmp_path,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    site = tmp_path / "build" / "site"
    text = (site / "api.html").read_text()
    assert "Train, probe every exit and their ensemble" in text  # docstrings are there
    assert (site / "results" / "information-h200.json").is_file()
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link|iframe)\b[^>]*?(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not loaded, page


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()
