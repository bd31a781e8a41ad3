"""Scenes of VOC and COCO, sound and broken."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from selfcon.data.scenes import IGNORED, load_scenes
from selfcon.errors import DataError, InputMissingError

BOX = "<object><name>{name}</name><difficult>{hard}</difficult><bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin>"
BOX += "<xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"


def write_voc(
    root: Path, *, box: tuple[int, ...] = (3, 5, 20, 18), name: str = "cat", mask: tuple[int, int] = (30, 40)
) -> Path:
    folder = root / "VOCdevkit" / "VOC2012"
    for below in ("JPEGImages", "Annotations", "SegmentationClass", "ImageSets/Main", "ImageSets/Segmentation"):
        (folder / below).mkdir(parents=True)
    for number, split in enumerate(("train", "val")):
        title = f"2012_{number}"
        Image.new("RGB", (40, 30), (9, 99, 200)).save(folder / "JPEGImages" / f"{title}.jpg")
        things = BOX.format(name=name, hard=0, box=box) + BOX.format(name="dog", hard=1, box=(1, 1, 40, 30))
        size = "<size><width>40</width><height>30</height><depth>3</depth></size>"
        (folder / "Annotations" / f"{title}.xml").write_text(f"<annotation>{size}{things}</annotation>")
        painted = np.zeros(mask, np.uint8)
        painted[2:9, 4:12], painted[0, 0] = 8, IGNORED
        image = Image.fromarray(painted, mode="P")
        image.putpalette([value for index in range(256) for value in (index, 0, 0)])
        image.save(folder / "SegmentationClass" / f"{title}.png")
        for task in ("Main", "Segmentation"):
            (folder / "ImageSets" / task / f"{split}.txt").write_text(f"{title}\n")
    return root


def write_coco(root: Path, **changes: object) -> Path:
    (root / "annotations").mkdir(parents=True)
    for number, split in enumerate(("train2017", "val2017")):
        (root / split).mkdir()
        Image.new("RGB", (40, 30), (9, 99, 200)).save(root / split / "a.jpg")
        square = [[2.0, 2.0, 12.0, 2.0, 12.0, 10.0, 2.0, 10.0]]
        thing = {"image_id": 7, "category_id": 18, "bbox": [2, 2, 10, 8], "area": 80.0, "iscrowd": 0, "id": number}
        tree = {
            "images": [{"id": 7, "file_name": "a.jpg", "height": 30, "width": 40}],
            "categories": [{"id": 1, "name": "person"}, {"id": 18, "name": "dog"}],
            "annotations": [{**thing, "segmentation": square, **changes}],
        }
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(tree))
    return root


def test_voc(tmp_path: Path) -> None:
    found = load_scenes(write_voc(tmp_path), "detect")
    assert (found.name, len(found.classes), len(found.train), len(found.test)) == ("VOC2012", 20, 1, 1)
    (scene,) = found.train
    assert scene.boxes.tolist() == [[2, 4, 20, 18], [0, 0, 40, 30]]  # from 0, the end not included
    assert [found.classes[label] for label in scene.labels] == ["cat", "dog"]
    assert scene.hard.tolist() == [False, True]
    assert scene.read().shape == (30, 40, 3)
    (painted,) = load_scenes(tmp_path, "segment").test
    assert set(np.unique(painted.mask())) == {0, 8, IGNORED}


def test_coco(tmp_path: Path) -> None:
    found = load_scenes(write_coco(tmp_path), "detect")
    (scene,) = found.test
    assert found.classes == ("person", "dog")
    assert scene.boxes.tolist() == [[2, 2, 12, 10]]
    assert (scene.labels.tolist(), scene.number) == ([1], 7)
    pytest.importorskip("pycocotools")
    mask = load_scenes(tmp_path, "segment").train[0].mask()
    assert set(np.unique(mask)) == {0, 2}
    assert 60 <= int((mask == 2).sum()) <= 100


@pytest.mark.parametrize(
    ("changes", "task", "says"),
    [
        ({"box": (3, 5, 60, 18)}, "detect", r"2012_0\.jpg has a box outside"),
        ({"box": (9, 5, 3, 18)}, "detect", r"2012_0\.jpg has an empty box"),
        ({"name": "unicorn"}, "detect", r"2012_0\.xml: it names the unknown class 'unicorn'"),
        ({"mask": (10, 40)}, "segment", r"2012_0\.jpg has a mask of 10 x 40"),
    ],
)
def test_broken_voc_is_named_and_can_be_left_out(
    changes: dict[str, object], task: str, says: str, tmp_path: Path
) -> None:
    write_voc(tmp_path / "broken", **changes)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=says):
        load_scenes(tmp_path / "broken", task)  # type: ignore[arg-type]
    sound = write_voc(tmp_path / "sound") / "VOCdevkit" / "VOC2012"
    folder = tmp_path / "broken" / "VOCdevkit" / "VOC2012"
    for below, suffix in (("JPEGImages", "jpg"), ("Annotations", "xml"), ("SegmentationClass", "png")):
        for number in range(2):
            data = (sound / below / f"2012_{number}.{suffix}").read_bytes()
            (folder / below / f"good{number}.{suffix}").write_bytes(data)
    for lists in ("Main", "Segmentation"):
        for number, split in enumerate(("train", "val")):
            with (folder / "ImageSets" / lists / f"{split}.txt").open("a") as file:
                file.write(f"good{number}\n")
    kept = load_scenes(tmp_path / "broken", task, skip_broken=True)  # type: ignore[arg-type]
    assert [scene.path.stem for scene in (*kept.train, *kept.test)] == ["good0", "good1"]


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputMissingError, match="holds neither VOCdevkit"):
        load_scenes(tmp_path, "detect")
    write_voc(tmp_path / "voc")
    folder = tmp_path / "voc" / "VOCdevkit" / "VOC2012"
    (folder / "Annotations" / "2012_0.xml").write_text("<annotation><size>")
    with pytest.raises(DataError, match=r"2012_0\.xml"):
        load_scenes(tmp_path / "voc", "detect")
    size = "<size><width>40</width><height>30</height></size>"
    (folder / "Annotations" / "2012_0.xml").write_text(f"<annotation>{size}</annotation>")
    with pytest.raises(DataError, match="it names no object"):
        load_scenes(tmp_path / "voc", "detect")
    (folder / "ImageSets" / "Main" / "val.txt").unlink()
    with pytest.raises(InputMissingError, match=r"val\.txt"):
        load_scenes(tmp_path / "voc", "detect")
    with pytest.raises(DataError, match="unknown category 99"):
        load_scenes(write_coco(tmp_path / "coco", category_id=99), "detect")
    (tmp_path / "coco" / "annotations" / "instances_val2017.json").write_text("{")
    with pytest.raises(DataError, match=r"instances_val2017\.json"):
        load_scenes(tmp_path / "coco", "detect")


@pytest.mark.parametrize(
    ("changes", "task"),
    [
        ({"bbox": [float("nan"), 0, 4, 4]}, "detect"),
        ({"segmentation": [[0, 0, 1e9, 1e9, 0, 1e9]]}, "segment"),
        ({"segmentation": [[0, 0, float("nan"), 5, 0, 9]]}, "segment"),
        ({"segmentation": [[0, 0, 5, 5]]}, "segment"),
        ({"segmentation": {"size": [30000, 30000], "counts": "0"}}, "segment"),
        ({"segmentation": {"size": [30, 40], "counts": [-5, 1205]}}, "segment"),
    ],
)
def test_outlines_that_crash_pycocotools_are_refused(changes: dict[str, object], task: str, tmp_path: Path) -> None:
    if task == "segment":
        pytest.importorskip("pycocotools")
    with pytest.raises(DataError, match=r"a\.jpg has a (box|mask)"):
        load_scenes(write_coco(tmp_path, **changes), task)  # type: ignore[arg-type]


def test_masks_are_png_and_images_of_a_sane_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *given, **_: called.append(given))
    folder = write_voc(tmp_path) / "VOCdevkit" / "VOC2012"
    eps = b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\n%ImageData: 40 30 8 1 0 1 1 "x"\n%%EOF\n'
    (folder / "SegmentationClass" / "2012_0.png").write_bytes(eps)
    huge = b"\x89PNG\r\n\x1a\n" + _png_chunk(b"IHDR", struct.pack(">IIBBBBB", 30000, 30000, 8, 0, 0, 0, 0))
    huge += _png_chunk(b"IDAT", zlib.compress(bytes(9)))
    (folder / "JPEGImages" / "2012_1.jpg").write_bytes(huge)
    with pytest.raises(DataError) as told:
        load_scenes(tmp_path, "segment")
    assert "2012_0.png is not an image (PNG)" in str(told.value)
    assert "2012_1.jpg has more than the 100 million pixels" in str(told.value)
    assert called == []


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_real_scenes() -> None:
    root = Path(os.environ.get("SELFCON_TEST_DATA", "nowhere"))
    if not root.is_dir():
        pytest.skip("SELFCON_TEST_DATA does not name a folder with real images")
    pytest.importorskip("pycocotools")
    counts = {"voc2012-small": (20, 110, 55), "coco-small": (80, 50, 50)}
    for name, expected in counts.items():
        for task in ("segment", "detect"):
            found = load_scenes(root / name, task)
            assert (len(found.classes), len(found.train), len(found.test)) == expected


def test_scenes_are_seen_as_they_are_stored(tmp_path: Path) -> None:
    root = write_coco(tmp_path)
    pixels = np.zeros((30, 40, 3), np.uint8)
    pixels[2:10, 2:12] = 255
    turned = Image.Exif()
    turned[0x0112] = 6
    for split in ("train2017", "val2017"):
        Image.fromarray(pixels).save(root / split / "a.jpg", exif=turned, quality=95)
    (scene,) = load_scenes(root, "detect").train
    assert scene.read()[3:9, 3:11].mean() > 200


@pytest.mark.parametrize(
    "changes", [{"segmentation": []}, {"segmentation": [[1.0, 2.0, 3.0, 4.0]]}, {"segmentation": 3}]
)
def test_masks_that_cannot_be_drawn_are_named(tmp_path: Path, changes: dict[str, object]) -> None:
    pytest.importorskip("pycocotools")
    with pytest.raises(DataError, match=r"a\.jpg has a mask that cannot be drawn"):
        load_scenes(write_coco(tmp_path, **changes), "segment")


def test_other_annotations_are_other_scenes(tmp_path: Path) -> None:
    first = load_scenes(write_coco(tmp_path / "a" / "coco"), "detect").fingerprint()
    assert load_scenes(write_coco(tmp_path / "b" / "coco"), "detect").fingerprint() == first
    assert load_scenes(write_coco(tmp_path / "c" / "coco", bbox=[2, 2, 10, 9]), "detect").fingerprint() != first
