"""Any picture becomes RGB; what is none is refused in a sentence that names it."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from selfcon.data.images import FORMATS, decode, read_image
from selfcon.errors import BadImageError


@pytest.fixture
def picture(patches: Any) -> Image.Image:
    return Image.fromarray(patches[0][:20])  # 32 wide, 20 high


@pytest.mark.parametrize(
    ("mode", "ending"),
    [
        ("RGB", "png"),
        ("L", "png"),
        ("P", "png"),
        ("RGBA", "png"),
        ("LA", "png"),
        ("1", "png"),
        ("CMYK", "jpg"),
        ("P", "gif"),
    ],
)
def test_modes_become_rgb(picture: Image.Image, tmp_path: Path, mode: str, ending: str) -> None:
    converted = picture.convert(mode)
    path = tmp_path / f"x.{ending}"
    converted.save(path)
    pixels = read_image(path)
    assert pixels.shape == (20, 32, 3)
    assert pixels.dtype == np.uint8
    expected = np.asarray(converted.convert("RGB")).astype(int)
    assert np.abs(pixels - expected).mean() < 6  # JPEG loses a little


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 20 * 32).astype(np.uint16).reshape(20, 32)
    for ending in ("png", "tif"):
        Image.fromarray(values).save(tmp_path / f"x.{ending}")
        pixels = read_image(tmp_path / f"x.{ending}")
        assert np.array_equal(pixels[..., 0], values >> 8)
        assert np.array_equal(pixels[..., 0], pixels[..., 2])


@pytest.mark.parametrize("ending", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_respected(picture: Image.Image, tmp_path: Path, orientation: int, ending: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"lossless": True} if ending == "webp" else {}
    picture.save(tmp_path / f"x.{ending}", exif=exif, **options)
    pixels = read_image(tmp_path / f"x.{ending}")
    stored = np.asarray(picture)
    turns = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: np.rot90(stored, -1),
        7: stored.transpose(1, 0, 2)[::-1, ::-1],
        8: np.rot90(stored, 1),
    }
    assert np.array_equal(pixels, turns[orientation])


def test_an_orientation_in_xmp_is_respected(picture: Image.Image, tmp_path: Path) -> None:
    packet = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    picture.save(tmp_path / "x.jpg", xmp=packet, quality=95)
    picture.save(tmp_path / "plain.jpg", quality=95)
    assert read_image(tmp_path / "x.jpg").shape[:2] == read_image(tmp_path / "plain.jpg").shape[1::-1]


def test_unreadable_exif_is_ignored_and_told(picture: Image.Image, tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    header = b"Exif\x00\x00MM\x00*\x00\x00\x00\x08"
    orientation_99 = b"\x00\x01\x01\x12\x00\x03\x00\x00\x00\x01\x00\x63\x00\x00\x00\x00\x00\x00"
    # A text where a number belongs, in another entry, does not cost the orientation.
    text_and_6 = b"\x00\x02\x01\x0a\x00\x02\x00\x00\x00\x06\x00\x00\x00&\x01\x12\x00\x03\x00\x00\x00\x01\x00\x06"
    text_and_6 += b"\x00" * 6 + b"hello\x00"
    for exif, ignored, shape in (
        (b"Exif\x00\x00XX nonsense", True, (20, 32, 3)),
        (header + orientation_99, True, (20, 32, 3)),
        (header + text_and_6, False, (32, 20, 3)),
    ):
        picture.save(path, exif=exif)
        decoded = decode(path)
        assert (decoded.pixels.shape, decoded.exif_ignored) == (shape, ignored)


def test_files_that_are_no_images(picture: Image.Image, tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("not a picture")
    picture.resize((300, 300)).save(tmp_path / "whole.jpg")
    picture.resize((300, 300)).save(tmp_path / "whole.png")
    for ending in ("jpg", "png"):
        data = (tmp_path / f"whole.{ending}").read_bytes()
        (tmp_path / f"cut.{ending}").write_bytes(data[: len(data) // 2])
    np.savez(tmp_path / "archive.png", x=np.zeros(3))
    (tmp_path / "archive.png.npz").rename(tmp_path / "archive.png")
    Image.fromarray(np.zeros((4, 4), dtype=np.float32)).save(tmp_path / "float.tif")
    Image.fromarray(np.zeros((4, 4), dtype=np.int32)).save(tmp_path / "int.tif")
    for name, words in {
        "empty.jpg": "is empty",
        "text.jpg": "is not an image",
        "cut.jpg": "cannot be read",
        "cut.png": "cannot be read",
        "archive.png": "is not an image",
        "float.tif": "floating-point",
        "int.tif": "32-bit integers",
        "missing.png": "is not there",
    }.items():
        with pytest.raises(BadImageError, match=words) as caught:
            read_image(tmp_path / name)
        assert name in str(caught.value)
        assert caught.value.exit_code == 65


GIANT = """
import resource, sys
from pathlib import Path
from selfcon.data.images import read_image
from selfcon.errors import BadImageError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        read_image(Path(path))
    except BadImageError as error:
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(grown, error)
"""


def tiff(width: int, height: int) -> bytes:
    """A directory alone: size, 8 bits of grey, uncompressed, in one strip behind it."""
    facts = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 200, 277: 1, 278: height, 279: width * height}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in facts.items())
    return b"II*\0" + struct.pack("<IH", 8, len(facts)) + entries + struct.pack("<I", 0)


def webp(width: int, height: int) -> bytes:
    """A lossless picture without its pixels."""
    body = b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + b"\0" * 16 + b"\0"
    inner = b"WEBP" + b"VP8L" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(inner)) + inner


def jpeg(width: int, height: int) -> bytes:
    """A whole small picture whose header tells another size."""
    written = io.BytesIO()
    Image.new("RGB", (16, 16)).save(written, "JPEG")
    data = bytearray(written.getvalue())
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


GIANTS = {
    "x.bmp": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 12_000, 12_000, 1, 24, 0, 0, 0, 0, 0, 0),
    "x.gif": b"GIF89a" + struct.pack("<HHBBB", 12_000, 12_000, 0, 0, 0)
    + b"," + struct.pack("<HHHHB", 0, 0, 12_000, 12_000, 0) + b"\x02\x02\x44\x01\0;",
    "x.jpg": jpeg(12_000, 12_000),
    "x.ppm": b"P6 12000 12000 255\n",
    "y.ppm": b"P6 40000 40000 255\n",
    "x.tif": tiff(12_000, 12_000),
    "x.webp": webp(12_000, 12_000),
}  # fmt: skip


@pytest.mark.medium
def test_giants_of_every_format_are_refused_from_their_headers(tmp_path: Path) -> None:
    for name, data in GIANTS.items():
        (tmp_path / name).write_bytes(data)
    assert {f".{each.lower()}" for each in FORMATS} - {".png"} <= {
        {".jpg": ".jpeg", ".tif": ".tiff"}.get(Path(name).suffix, Path(name).suffix) for name in GIANTS
    }
    paths = [tmp_path / name for name in GIANTS]
    done = subprocess.run([sys.executable, "-c", GIANT, *paths], capture_output=True, text=True, check=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == len(GIANTS)
    for path, line in zip(paths, lines, strict=True):
        grown, _, message = line.partition(" ")
        assert str(path) in message
        assert "more than the 100 million" in message
        assert int(grown) < 200_000  # KiB


@pytest.mark.medium
@pytest.mark.parametrize(("width", "height"), [(20_000, 20_000), (12_000, 9_000)])
def test_a_giant_is_refused_from_its_header(tmp_path: Path, width: int, height: int) -> None:
    """A whole and valid picture; in a process of its own, whose memory is measured."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    compress = zlib.compressobj(1)
    row = b"\0" * (1 + 3 * width)
    body = b"".join(compress.compress(row) for _ in range(height)) + compress.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path = tmp_path / "giant.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b""))
    done = subprocess.run([sys.executable, "-c", GIANT, path], capture_output=True, text=True, check=True, timeout=60)
    grown, _, message = done.stdout.partition(" ")
    assert "more than the 100 million" in message
    assert int(grown) < 200_000  # KiB
