"""One image file as RGB, whatever it is; or one sentence that says why not.

Grey, palette, CMYK and 16-bit images are converted, EXIF orientation is applied. The size is checked in the header,
before anything is decoded, and only formats that are meant for pictures are opened.
"""

from __future__ import annotations

import contextlib
import re
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from selfcon.errors import BadImageError

Pixels = npt.NDArray[np.uint8]
"""[H, W, 3] or more of them, [N, H, W, 3]."""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
MAX_PIXELS = 100_000_000
_MOST_BYTES = 1 << 30  # of a file
_LONGEST_HEADER, _LONGEST_TEXT = 1 << 16, 1 << 24  # bytes of a PPM, and of one that is text
_COMMENT = re.compile(rb"#[^\r\n]*")
_MOST_SCANS = 2_000_000_000  # pixels of a JPEG, times how often they are gone through
_WIDEST = 8  # times its shorter side an image may be long before its ends are cut off
_WRONG = (
    *(OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error, zlib.error),
    Image.DecompressionBombError,
)

# Pillow warns of metadata that nobody here reads. For good, since catching warnings for a while is not safe in threads.
warnings.filterwarnings("ignore", module=r"PIL\.")


@dataclass(frozen=True)
class Decoded:
    """An image, and whether its EXIF data could not be read and was ignored."""

    pixels: Pixels
    exif_ignored: bool = False


def middle(pixels: Pixels) -> Pixels:
    """An image without the ends of its longer side where that is so long that resizing would take all memory."""
    short = _WIDEST * max(1, min(pixels.shape[:2]))
    top, left = (max(0, side - short) // 2 for side in pixels.shape[:2])
    return pixels[top : top + short, left : left + short] if top or left else pixels


def from_pillow(image: Image.Image) -> Pixels:
    """The pixels [H, W, 3] of an image that Pillow has opened or made."""
    try:
        if image.width * image.height > MAX_PIXELS:
            raise BadImageError(f"The image has {image.width} x {image.height} pixels, more than allowed.")
        return _to_rgb(_upright(image)[0], image.format)
    except _WRONG as error:
        if isinstance(error, BadImageError):
            raise
        raise BadImageError(f"The image cannot be read: {str(error).rstrip('.') or type(error).__name__}.") from error


def read_image(path: Path, *, turn: bool = True) -> Pixels:
    """The pixels [H, W, 3] of an image file; `turn` as in `decode`."""
    return decode(path, turn=turn).pixels


def decode(path: Path, data: bytes | None = None, *, turn: bool = True) -> Decoded:
    """The pixels of an image file and what was noticed on the way; BadImageError where there are none.

    With `data`, the contents of the file, it is not read again. `turn` is whether a photograph is turned upright as its
    EXIF data say; annotations are of the pixels as they are stored.
    """
    try:
        data = _read(path) if data is None else data
        _check_ppm(path, data)
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = _check_size(path, image)
            if image.format == "JPEG" and data.count(b"\xff\xda") * width * height > _MOST_SCANS:
                raise BadImageError(f"{path} has so many scans that reading it would take too long.")
            if (quick := _decode_jpeg(image, data)) is not None:
                return Decoded(quick)
            upright, exif_ignored = _upright(image) if turn else (image, False)
            return Decoded(_to_rgb(upright, image.format), exif_ignored)
    except _WRONG as error:
        raise _as_bad(path, error, FORMATS, empty=not data) from error


def read_size(path: Path) -> tuple[int, int]:
    """Height and width of an image file, from its header."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            width, height = _check_size(path, image)
            return height, width
    except _WRONG as error:
        raise _as_bad(path, error, FORMATS) from error


def read_numbers(path: Path) -> Pixels:
    """[H, W]: the numbers of a PNG that holds one a pixel, as masks do; those of a palette, not its colours."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            _check_size(path, image)
            if image.mode not in ("P", "L"):
                raise BadImageError(f"{path} is of mode {image.mode}, and masks have one number a pixel.")
            return np.array(image, dtype=np.uint8)
    except _WRONG as error:
        raise _as_bad(path, error, ("PNG",)) from error


def _check_size(path: Path, image: Image.Image) -> tuple[int, int]:
    """Width and height."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImageError(
            f"{path} has {width} x {height} pixels, more than the {MAX_PIXELS / 1e6:.0f} million allowed."
        )
    return width, height


def _as_bad(path: Path, error: Exception, formats: tuple[str, ...], *, empty: bool = False) -> BadImageError:
    """What went wrong, in a sentence."""
    if isinstance(error, BadImageError):
        return error
    why = f"cannot be read: {str(error).rstrip('.') or type(error).__name__}"
    if isinstance(error, Image.DecompressionBombError):
        why = f"has more than the {MAX_PIXELS / 1e6:.0f} million pixels allowed"
    elif isinstance(error, FileNotFoundError):
        why = "is not there"
    elif isinstance(error, UnidentifiedImageError):
        why = "is empty" if empty else f"is not an image ({', '.join(formats)})"
    return BadImageError(f"{path} {why}.")


def _read(path: Path) -> bytes:
    if path.stat().st_size > _MOST_BYTES:
        raise BadImageError(f"{path} has more than the {_MOST_BYTES / 1e9:.1f} GB allowed.")
    return path.read_bytes()


def _check_ppm(path: Path, data: bytes) -> None:
    """Pillow reads these files' headers, and pixels that are text or not of 8 bits, a letter at a time."""
    kind = data[1:2]
    if data[:1] != b"P" or not kind.isdigit():
        return
    words = _COMMENT.sub(b" ", data[:_LONGEST_HEADER]).split(maxsplit=4)
    if len(words) < 4 and len(data) > _LONGEST_HEADER:
        raise BadImageError(f"{path} does not come to its pixels within {_LONGEST_HEADER:,} bytes.")
    if len(data) > _LONGEST_TEXT and (kind in b"123" or (kind in b"56" and words[3] != b"255")):
        raise BadImageError(f"{path} would take too long to read: a PPM of this size must hold 8 bits a value.")


def _decode_jpeg(image: Image.Image, data: bytes) -> Pixels | None:
    """A plain JPEG in colour, to the same bits in half of Pillow's time; what is broken is left to Pillow."""
    quick = _quick_decoder()
    if quick is None or image.format != "JPEG" or image.mode != "RGB" or {"exif", "xmp"} & image.info.keys():
        return None
    try:
        decoded = quick(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    except (RuntimeError, ValueError):
        return None
    pixels: Pixels = decoded.permute(1, 2, 0).numpy()
    return pixels if pixels.shape == (image.height, image.width, 3) else None


@cache
def _quick_decoder() -> Callable[[Tensor], Tensor] | None:
    """TorchCodec's where it is installed, else torchvision's, which is going to leave it."""
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        from torchcodec.decoders import decode_jpeg  # type: ignore[import-not-found, unused-ignore]

        return decode_jpeg  # type: ignore[no-any-return, unused-ignore]
    with contextlib.suppress(ImportError, AttributeError):
        import torchvision.io  # noqa: F401 - brings the operator

        operator = torch.ops.image.decode_jpeg
        return lambda data: operator(data, 0, False)
    return None


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
        grey = np.asarray(image)
        grey = grey if grey.dtype == np.uint16 else grey.clip(0, 0xFFFF)
        return np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, axis=2)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
