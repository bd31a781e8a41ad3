"""Pictures of our own pages for docs/pictures: the report, the served page, the terminal, the site. `make screenshots`.

Five methods are those of results/; for the rest a small run on the digits is trained, and chromium looks at what comes.
"""

from __future__ import annotations

import html
import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.browser.chrome import CHROMIUM, Page, browse
from tests.deploy.serving import serving

import selfcon

PICTURES = ROOT / "docs" / "pictures"
METHODS = {"ce": 500, "supcon": 1000, "supcon-s": 1000, "selfcon": 1000, "selfcon-m": 1000}
_TERMINAL = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; padding: 18px 22px; background: #16181d; color: #d7dae0; }}
body {{ font: 14px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }}
pre {{ margin: 0; white-space: pre; font: inherit; }} b {{ color: #7fb8ff; font-weight: 600; }}</style><pre>{}</pre>"""


def train(folder: Path) -> None:
    for method, epochs in METHODS.items():
        run = ROOT / "results" / f"cifar100-resnet18-{method}-{epochs}-epochs"
        shutil.copytree(run, folder / "five" / method)
    selfcon.fit(data="digits", out=folder / "run", device="cpu")
    selfcon.calibrate(folder / "run", within=1, device="cpu")


def speak(folder: Path) -> str:
    """What the command line says, as a page."""
    lines = []
    for words in (["evaluate", "run"], ["calibrate", "run"], ["reproduce", "show", "T1"]):
        done = subprocess.run(
            [sys.executable, "-m", "selfcon", *words], cwd=folder, capture_output=True, text=True, check=True
        )
        shown = done.stdout.rstrip().splitlines()[:16]
        lines += [f"<b>$ selfcon {html.escape(' '.join(words))}</b>", *map(html.escape, shown), ""]
    return _TERMINAL.format("\n".join(lines))


def shoot(page: Page, url: str, name: str, *, width: int, height: int, dark: bool = False, ready: str = "true") -> None:
    page.open(url, width=width, height=height, dark=dark)
    page.wait(ready)
    time.sleep(0.5)
    path = PICTURES / f"{name}.png"
    page.screenshot(path)
    with Image.open(io.BytesIO(path.read_bytes())) as picture:
        seen = picture.convert("RGB").crop((0, 0, min(width, picture.width), min(height, picture.height)))
        seen.quantize(128).save(path, optimize=True)


def main() -> None:
    if CHROMIUM is None:
        sys.exit("chromium is needed for this (apt install chromium)")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        train(folder)
        compared = selfcon.write_report(
            [folder / "five" / method for method in METHODS], out=folder / "compare.html"
        ).as_uri()
        single = selfcon.write_report([folder / "run"]).as_uri()
        (folder / "terminal.html").write_text(speak(folder))
        with browse(folder / "profile") as page:
            shoot(page, compared, "report-five", width=1200, height=1345)
            shoot(page, compared, "report-phone", width=390, height=800, dark=True)
            shoot(page, single, "report-one", width=1200, height=1500)
            shoot(page, (folder / "terminal.html").as_uri(), "terminal", width=1100, height=640)
            shoot(page, (ROOT / "build" / "site" / "index.html").as_uri(), "site", width=1200, height=800)
            with serving(folder) as (port, _):
                url = f"http://127.0.0.1:{port}"
                ready = "document.querySelectorAll('#neighbours img').length === 8"
                shoot(page, f"{url}/#test/3", "served", width=1200, height=1000, ready=ready)
                shoot(page, f"{url}/#test/3", "served-phone", width=390, height=800, dark=True, ready=ready)


if __name__ == "__main__":
    main()
