"""The page of the service in a real browser: an upload, the keyboard, every screen, and nobody else asked."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import selfcon
from tests.browser.chrome import CHROMIUM, Page, browse
from tests.deploy.serving import serving
from tests.workflows.conftest import write_stripes

pytest.importorskip("fastapi")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a service, and a folder."""
    folder = tmp_path_factory.mktemp("served")
    data = write_stripes(folder / "stripes.npz", train=96)
    small: Any = {"width": 0.125, "epochs": 2, "batch_size": 32, "probe.epochs": 4, "device": "cpu"}
    selfcon.fit(data=str(data), out=folder / "run", **small)
    selfcon.calibrate(folder / "run", within=1, device="cpu")
    with serving(folder) as (port, _):
        yield f"http://127.0.0.1:{port}", folder


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browse(tmp_path / "profile") as found:
        yield found


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_an_upload_is_answered(served: tuple[str, Path], page: Page, tmp_path: Path, width: int, dark: bool) -> None:
    url, folder = served
    image = tmp_path / "mine.png"
    Image.fromarray(np.load(folder / "stripes.npz")["x_test"][0]).save(image)
    page.open(url, width=width, height=900, dark=dark)
    page.wait("document.querySelectorAll('#samples button').length === 24")
    page.upload("#file", image)
    page.wait("!document.getElementById('result').hidden && document.querySelectorAll('#neighbours img').length === 8")
    expected = selfcon.load(folder / "run", "cpu").predict(image, exit="early")[0]
    assert expected.classes[0] in page.run("document.getElementById('answer').textContent")
    assert page.run("document.querySelectorAll('.exit').length") == 2
    assert page.run("document.querySelectorAll('.exit.chosen').length") == 1
    assert page.run("document.querySelectorAll('.exit canvas').length") == 2
    # A class may be called anything: it is shown as it is, and is no markup.
    assert page.run("document.querySelector('b') === null")
    assert "<b>wide</b>" in page.run("document.body.textContent")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")  # nothing sticks out
    ground = page.run("getComputedStyle(document.documentElement).colorScheme")
    assert "dark" in ground
    shot = tmp_path / "shot.png"
    page.screenshot(shot)
    pixels = np.asarray(Image.open(io.BytesIO(shot.read_bytes())).convert("L"))
    assert (pixels[:40].mean() < 100) == dark
    assert page.errors == []
    assert all(each.startswith((url, "blob:", "data:")) for each in page.requests)


def test_the_budget_and_the_keyboard(served: tuple[str, Path], page: Page) -> None:
    url, _ = served
    page.open(f"{url}/#test/3")
    page.wait("!document.getElementById('result').hidden")
    slide = "(b => {{ b.value = {}; b.dispatchEvent(new Event('input')); }})(document.getElementById('budget'))"
    page.run(slide.format("0"))
    assert "answers here" in page.run("document.querySelector('.exit.chosen').textContent")
    assert "saves" in page.run("document.getElementById('verdict').textContent")
    page.run(slide.format("b.max"))
    assert page.run("document.querySelector('.exit.chosen h3').firstChild.textContent") == "ensemble"
    sure = page.run("document.querySelector('.exit.chosen .guess').children[1].textContent")
    assert page.run("document.getElementById('answer').textContent").endswith(sure)
    page.wait("document.querySelectorAll('#neighbours img').length === 8")
    page.run("document.querySelectorAll('#samples button')[5].focus()")
    before = page.run("document.querySelectorAll('#neighbours img')[0].src")
    page.press("Enter")
    page.wait("document.getElementById('status').textContent === ''")
    page.wait(f"document.querySelectorAll('#neighbours img')[0].src !== {json.dumps(before)}")
    assert page.errors == []


def test_what_is_no_image_is_told(served: tuple[str, Path], page: Page, tmp_path: Path) -> None:
    url, _ = served
    (tmp_path / "x.png").write_bytes(b"no image")
    page.open(url)
    page.wait("document.querySelectorAll('#samples button').length === 24")
    page.upload("#file", tmp_path / "x.png")
    page.wait("document.getElementById('status').textContent.includes('is not an image')")
    assert page.run("document.getElementById('result').hidden")
