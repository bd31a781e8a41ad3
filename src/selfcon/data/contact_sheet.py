"""A picture of a data set: a row of images for each class."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from selfcon.data.source import Source
from selfcon.errors import BadImageError, StorageError, UsageError, printable

_CELL, _GAP, _IMAGES, _TITLE = 48, 3, 10, 150
_MOST_CLASSES = 200
_MARK = "selfcon contact sheet"
_ROWS_IN_A_COLUMN = 40


def draw_contact_sheet(source: Source, path: str | Path) -> Path:
    """Write a PNG with up to ten training images of each class, of the first 200 classes."""
    classes = source.classes[:_MOST_CLASSES]
    columns = -(-len(classes) // _ROWS_IN_A_COLUMN)
    rows = -(-len(classes) // columns)
    wide = _TITLE + _IMAGES * (_CELL + _GAP) + 4 * _GAP
    sheet = Image.new("RGB", (columns * wide, rows * (_CELL + _GAP) + _GAP), "white")
    pen, font = ImageDraw.Draw(sheet), _find_font()
    for label, name in enumerate(classes):
        left, top = label // rows * wide, label % rows * (_CELL + _GAP) + _GAP
        members = np.flatnonzero(source.train.labels == label)
        pen.text((left + 2 * _GAP, top + 6), _shorten(name, font), fill="black", font=font)
        pen.text((left + 2 * _GAP, top + 26), f"{len(members):,}", fill="grey", font=font)
        for place, index in enumerate(members[:_IMAGES]):
            cell = _thumbnail(source, int(index))
            sheet.paste(cell, (left + _TITLE + place * (_CELL + _GAP), top))
    path = Path(path)
    if path.exists() and not _is_sheet(path):
        raise UsageError(f"{path} is there and is no contact sheet: it is not replaced.")
    mark = PngInfo()
    mark.add_text("Software", _MARK)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path, format="PNG", pnginfo=mark)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path


def _is_sheet(path: Path) -> bool:
    try:
        with Image.open(path, formats=("PNG",)) as image:
            return bool(image.info.get("Software") == _MARK)
    except OSError:
        return False


def _thumbnail(source: Source, index: int) -> Image.Image:
    try:
        image = Image.fromarray(np.array(source.train[index]))
    except BadImageError:
        return Image.new("RGB", (_CELL, _CELL), "crimson")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return square.resize((_CELL, _CELL), Image.Resampling.LANCZOS if side > _CELL else Image.Resampling.NEAREST)


def _find_font() -> ImageFont.FreeTypeFont:
    """One that has more letters than Pillow's own."""
    return ImageFont.truetype(str(files("matplotlib") / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"), 12)


def _shorten(name: str, font: Any) -> str:
    """As much of a name as fits before the images."""
    shown, most = printable(name)[:80], _TITLE - 4 * _GAP
    if font.getlength(shown) <= most:
        return shown
    while font.getlength(shown + "…") > most:
        shown = shown[:-1]
    return shown + "…"
