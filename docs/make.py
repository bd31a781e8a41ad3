"""Build the site: these pages, the README as the first, and the files of results/ that they name, into build/site.

`make site` runs it. Links that lead out of the repository's documents are followed: to a copy where that is a page or a
result, and otherwise they become plain text. What cannot be found is an error, so links cannot rot.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
_TOP = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def gather() -> list[Path]:
    """All pages in one folder, with links that work there."""
    shutil.rmtree(PAGES, ignore_errors=True)
    sources = {ROOT / "README.md": "index.md", **{ROOT / name: name.lower() for name in _TOP}}
    sources |= {path: str(path.relative_to(ROOT / "docs")) for path in sorted((ROOT / "docs").rglob("*.md"))}
    for path, place in sources.items():
        target = PAGES / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_LINK.sub(partial(_follow, page=path, sources=sources), path.read_text(encoding="utf-8")))
    _copy(ROOT / "docs" / "site.css", PAGES / "site.css")
    return [PAGES / place for place in sources.values()]


def _follow(link: re.Match[str], page: Path, sources: dict[Path, str]) -> str:
    """A link of a page as it must be on the site."""
    mark, text, target = link.groups()
    path, _, part = target.partition("#")
    found = (page.parent / path).resolve()
    if not found.exists():
        sys.exit(f"{page.relative_to(ROOT)} links to {target}, which is not there")
    here = PAGES / sources[page]
    if found in sources:
        place = PAGES / sources[found]
    elif found.is_relative_to(ROOT / "docs"):
        place = _copy(found, PAGES / found.relative_to(ROOT / "docs"))
    elif found.is_relative_to(ROOT / "results"):
        whole = {ROOT / "results": "index.json"}.get(found, "results.json")
        chosen = found / whole if found.is_dir() else found
        place = _copy(chosen, PAGES / chosen.relative_to(ROOT))
    else:
        return f"`{text.strip('`')}`" if found.suffix == ".py" else text
    return f"{mark}[{text}]({os.path.relpath(place, here.parent)}{'#' + part if part else ''})"


def _copy(found: Path, place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(found, place)
    return place


if __name__ == "__main__":
    gather()
    sys.exit(subprocess.run(["zensical", "build", "--clean"], cwd=ROOT, check=False).returncode)
