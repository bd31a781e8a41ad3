"""The report of several runs in a real browser: sorted, filtered, on every screen, and nobody asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import selfcon
from selfcon.workflows.reporting import write_report
from tests.browser.chrome import CHROMIUM, Page, browse
from tests.workflows.conftest import write_stripes

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
METHODS = ("ce", "supcon", "supcon-s", "selfcon", "selfcon-m")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report of five methods."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_stripes(folder / "stripes.npz", train=64)
    small: Any = {"width": 0.125, "epochs": 1, "batch_size": 32, "probe.epochs": 2, "device": "cpu"}
    for seed, method in enumerate(METHODS):
        selfcon.fit(data=str(data), out=folder / f"run <{method}>", method=method, seed=seed, **small)
    return write_report([folder / f"run <{method}>" for method in METHODS], out=folder / "all.html").as_uri()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browse(tmp_path / "profile") as found:
        yield found


def column(page: Page, number: int) -> list[str]:
    cells = f"[...document.querySelectorAll('table.sortable tbody tr')].map(r => r.cells[{number}].textContent.trim())"
    found: list[str] = page.run(cells)
    return found


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_sticks_out_and_nobody_is_asked(url: str, page: Page, width: int, dark: bool) -> None:
    page.open(url, width=width, dark=dark)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert page.run("document.querySelectorAll('section').length") == len(METHODS)
    assert page.errors == []
    assert all(each.startswith(("file:", "data:")) for each in page.requests)


def test_columns_are_sorted(url: str, page: Page) -> None:
    page.open(url)
    page.run("document.querySelectorAll('th button')[1].click()")
    assert column(page, 1) == sorted(METHODS)
    page.run("document.querySelectorAll('th button')[1].click()")
    assert column(page, 1) == sorted(METHODS, reverse=True)
    head = "document.querySelectorAll('th')[1].getAttribute('aria-sort')"
    assert page.run(head) == "descending"
    place = page.run("[...document.querySelectorAll('th')].findIndex(each => each.textContent === 'exit2')")
    page.run(f"document.querySelectorAll('th button')[{place}].click()")  # an exit that some have not
    found = column(page, place)
    known = [float(each) for each in found if each]
    assert known == sorted(known)
    assert found[len(known) :] == [""] * 3
    assert page.errors == []


def test_runs_are_filtered(url: str, page: Page) -> None:
    page.open(url)
    words = "(f => {{ f.value = '{}'; f.dispatchEvent(new Event('input')); }})(document.getElementById('filter'))"
    page.run(words.format("SUPCON stripes"))
    shown = "[...document.querySelectorAll('table.sortable tbody tr')].filter(r => !r.hidden).length"
    assert page.run(shown) == 2
    assert page.run("[...document.querySelectorAll('section')].filter(s => !s.hidden).length") == 2
    assert page.run("document.getElementById('shown').textContent") == "2 of 5 runs"
    page.run(words.format(""))
    assert page.run(shown) == 5
    assert page.errors == []
