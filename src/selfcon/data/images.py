"""One image file as RGB, whatever it is; or one sentence that says why not.

Grey, palette, CMYK and 16-bit images are converted, EXIF orientation is applied. The size is checked in the header,
before anything is decoded, and only formats that are meant for pictures are opened.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, UnidentifiedImageError

from selfcon.errors import BadImageError

Pixels = npt.NDArray[np.uint8]
"""[H, W, 3] or more of them, [N, H, W, 3]."""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
MAX_PIXELS = 100_000_000

# Pillow warns of metadata that nobody here reads. For good, since catching warnings for a while is not safe in threads.
warnings.filterwarnings("ignore", module=r"PIL\.")


@dataclass(frozen=True)
class Decoded:
    """An image, and whether its EXIF data could not be read and was ignored."""

    pixels: Pixels
    exif_ignored: bool = False


def read_image(path: Path) -> Pixels:
    """The pixels [H, W, 3] of an image file."""
    return decode(path).pixels


def decode(path: Path, data: bytes | None = None) -> Decoded:
    """The pixels of an image file and what was noticed on the way; BadImageError where there are none.

    With `data`, the contents of the file, it is not read again.
    """
    try:
        with Image.open(path if data is None else BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise BadImageError(
                    f"{path} has {width} x {height} pixels, more than the {MAX_PIXELS / 1e6:.0f} million allowed."
                )
            upright, exif_ignored = _upright(image)
            return Decoded(_to_rgb(upright, image.format), exif_ignored)
    except Image.DecompressionBombError as error:
        raise BadImageError(f"{path} has more than the {MAX_PIXELS / 1e6:.0f} million pixels allowed.") from error
    except FileNotFoundError as error:
        raise BadImageError(f"{path} is not there.") from error
    except UnidentifiedImageError as error:
        empty = path.stat().st_size == 0 if data is None else not data
        why = "is empty" if empty else f"is not an image ({', '.join(FORMATS)})"
        raise BadImageError(f"{path} {why}.") from error
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error, zlib.error) as error:
        if isinstance(error, BadImageError):
            raise
        raise BadImageError(f"{path} cannot be read: {str(error).rstrip('.') or type(error).__name__}.") from error


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _upright(image: Image.Image) -> tuple[Image.Image, bool]:
    """The image turned as its EXIF orientation says, and whether there was EXIF data that says nothing readable.

    Pillow's own function also writes the data anew, which fails where any other entry is broken. A TIFF is turned when
    it is loaded, so loading comes first.
    """
    image.load()
    try:
        exif = image.getexif()
        orientation = exif.get(ExifTags.Base.Orientation, 1)
        unreadable = bool(image.info.get("exif")) and not exif
    except Exception:  # EXIF data of whatever kind must not cost the image
        return image, True
    if orientation in _TURNS:
        return image.transpose(_TURNS[orientation]), unreadable
    return image, unreadable or orientation != 1


def _to_rgb(image: Image.Image, file_format: str | None) -> Pixels:
    if image.mode == "F" or (image.mode == "I" and file_format != "PPM"):
        kind = "floating-point numbers" if image.mode == "F" else "32-bit integers"
        raise ValueError(f"it holds {kind}, whose range is unknown")
    if image.mode.startswith("I"):  # 16 bits a pixel; Pillow would clip them instead of scaling
        grey = np.asarray(image).astype(np.int64).clip(0, 0xFFFF)
        return np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, axis=2)
    return np.asarray(image.convert("RGB"))
