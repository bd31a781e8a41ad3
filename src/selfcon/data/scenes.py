"""Images with boxes and masks: Pascal VOC and COCO in their usual layouts, looked through before anything is trained.

What is wrong is named by its file. Classes are counted from 0; the background of a mask is 0 there and classes follow
from 1, and 255 stands for what does not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree as ET

import numpy as np
import numpy.typing as npt

from selfcon.data.images import MAX_PIXELS, Pixels, read_image, read_numbers, read_size
from selfcon.data.scan import in_threads
from selfcon.errors import DataError, InputMissingError, UsageError, name_some
from selfcon.progress import say

IGNORED = 255
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
Task = Literal["segment", "detect"]
Mask = npt.NDArray[np.uint8]
_LARGEST_XML = 1_000_000
_MOST_CLASSES = 254
_FARTHEST = 10  # times the longer side of an image, a corner of what is in it may lie away


@dataclass(frozen=True, eq=False)
class Scene:
    """One image and what is in it; `hard` objects (VOC's difficult, COCO's crowds) do not count as found or missed.

    With `crowds` they are areas of many objects, within which nothing found is wrong; else each is one object.
    """

    path: Path
    size: tuple[int, int]  # height and width as annotated
    boxes: npt.NDArray[np.float32]  # [M, 4]: left, top, right, bottom, in pixels
    labels: npt.NDArray[np.int64]  # [M]
    hard: npt.NDArray[np.bool_]  # [M]
    draw_mask: Callable[[], Mask] | None = None
    number: int = 0  # COCO's, or the place in the list
    crowds: bool = False

    def read(self) -> Pixels:
        """As stored: annotations know nothing of how a camera was held."""
        return read_image(self.path, turn=False)

    def mask(self) -> Mask:
        """[H, W]: classes from 1, 0 the background, 255 what does not count."""
        if self.draw_mask is None:
            raise UsageError(f"{self.path} has no mask.")
        return self.draw_mask()


@dataclass(frozen=True)
class Scenes:
    """A data set of scenes."""

    name: str
    classes: tuple[str, ...]
    train: Sequence[Scene]
    test: Sequence[Scene]

    def fingerprint(self) -> str:
        """A hash of which files there are, how large, and what is annotated in them."""
        found = hashlib.sha256(json.dumps([self.name, self.classes]).encode())
        for scene in (*self.train, *self.test):
            facts = [scene.path.name, scene.path.stat().st_size, scene.size, scene.labels.tolist(), scene.hard.tolist()]
            found.update(json.dumps(facts).encode() + scene.boxes.tobytes())
        return found.hexdigest()


def load_scenes(folder: str | Path, task: Task, *, skip_broken: bool = False) -> Scenes:
    """A folder that holds VOCdevkit, or is one, or COCO's `annotations` and images.

    Broken scenes are refused, all of them together, or left out with `skip_broken`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputMissingError(f"There is no folder {folder}.")
    if (folder / "annotations").is_dir():
        scenes, problems = _load_coco(folder)
    else:
        scenes, problems = _load_voc(_find_voc(folder), task)
    return _check(scenes, problems, task, skip_broken=skip_broken)


def _check(scenes: Scenes, problems: list[str], task: Task, *, skip_broken: bool) -> Scenes:
    kept = {}
    for split, every in (("train", scenes.train), ("test", scenes.test)):
        found = list(in_threads(partial(_find_problem, task=task), every, describe=_name))
        problems += [problem for problem in found if problem]
        kept[split] = [scene for scene, problem in zip(every, found, strict=True) if not problem]
    if problems and not skip_broken:
        raise DataError(
            f"{scenes.name} has {len(problems)} broken annotations: {name_some(problems)}. "
            f"--skip-broken leaves them out."
        )
    if problems:
        say(f"{scenes.name}: {len(problems)} broken annotations are left out: {name_some(problems)}")
    for split, some in kept.items():
        if not some:
            raise DataError(f"{scenes.name} has no sound scene to {split} with.")
    if task == "detect" and all(scene.hard.all() for scene in kept["test"]):
        raise DataError(f"{scenes.name} has no object to be found in the scenes to test on, but for hard ones.")
    return replace(scenes, train=kept["train"], test=kept["test"])


def _find_problem(scene: Scene, task: Task) -> str | None:
    """What is wrong with a scene, by its file."""
    try:
        height, width = read_size(scene.path)
    except DataError as error:
        return str(error).rstrip(".")
    if scene.size != (height, width):
        return f"{scene.path} is {height} x {width} and annotated as {scene.size[0]} x {scene.size[1]}"
    if task == "segment":
        try:
            shape = scene.mask().shape
        except (OSError, DataError) as error:
            return str(error).rstrip(".")
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            return f"{scene.path} has a mask that cannot be drawn ({error!r})"
        return None if shape == (height, width) else f"{scene.path} has a mask of {shape[0]} x {shape[1]}"
    boxes = scene.boxes
    if not np.isfinite(boxes).all():
        return f"{scene.path} has a box whose sides are no numbers"
    if len(boxes) and bool((boxes[:, 2:] <= boxes[:, :2]).any()):
        return f"{scene.path} has an empty box"
    outside = (boxes < -1).any() or (boxes[:, 2] > width + 1).any() or (boxes[:, 3] > height + 1).any()
    return f"{scene.path} has a box outside the image" if bool(outside) else None


def _find_voc(folder: Path) -> Path:
    below = folder / "VOCdevkit"
    places = [folder, below, *sorted(folder.glob("VOC2*")), *sorted(below.glob("VOC2*"))]
    found = [place for place in places if (place / "ImageSets").is_dir()]
    if not found:
        raise InputMissingError(f"{folder} holds neither VOCdevkit/VOC2012 (or VOC2007) nor COCO's annotations.")
    return found[-1]


def _load_voc(folder: Path, task: Task) -> tuple[Scenes, list[str]]:
    lists = folder / "ImageSets" / ("Segmentation" if task == "segment" else "Main")
    train, test = ("trainval", "test") if folder.name == "VOC2007" else ("train", "val")
    problems: list[str] = []
    splits = []
    for split in (train, test):
        path = lists / f"{split}.txt"
        if not path.is_file():
            raise InputMissingError(f"{path} is not there, which says what belongs to {split}.")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.split()[0] for line in lines if line.strip()]
        splits.append([scene for name in names if (scene := _read_voc(folder, name, task, problems)) is not None])
    return Scenes(folder.name, VOC_CLASSES, train=splits[0], test=splits[1]), problems


def _read_voc(folder: Path, name: str, task: Task, problems: list[str]) -> Scene | None:
    image = folder / "JPEGImages" / f"{name}.jpg"
    if task == "segment":
        try:
            size = read_size(image)
        except DataError as error:
            problems.append(str(error).rstrip("."))
            return None
        nothing = np.zeros((0, 4), np.float32)
        path = folder / "SegmentationClass" / f"{name}.png"
        return Scene(image, size, nothing, np.zeros(0, np.int64), np.zeros(0, np.bool_), lambda: _read_voc_mask(path))
    path = folder / "Annotations" / f"{name}.xml"
    try:
        return _parse_voc(path, image)
    except (OSError, ET.ParseError, AttributeError, TypeError, ValueError, DataError) as error:
        problems.append(f"{path}: {str(error).rstrip('.') or type(error).__name__}")
        return None


def _parse_voc(path: Path, image: Path) -> Scene:
    if path.stat().st_size > _LARGEST_XML:
        raise DataError("it is larger than an annotation can be")
    tree = ET.fromstring(path.read_text(encoding="utf-8"))  # noqa: S314 - small, and expat bounds what entities grow to
    size = tree.find("size")
    if size is None:
        raise DataError("it tells no size")
    boxes, labels, hard = [], [], []
    for thing in tree.iter("object"):
        name = (thing.findtext("name") or "").strip()
        if name not in VOC_CLASSES:
            raise DataError(f"it names the unknown class {name!r}")
        box = thing.find("bndbox")
        if box is None:
            raise DataError(f"it has a {name} without a box")
        # VOC counts pixels from 1, both ends included.
        left, top, right, bottom = (float(box.findtext(key) or "") for key in ("xmin", "ymin", "xmax", "ymax"))
        boxes.append([left - 1, top - 1, right, bottom])
        labels.append(VOC_CLASSES.index(name))
        hard.append((thing.findtext("difficult") or "0").strip() == "1")
    if not boxes:
        raise DataError("it names no object")
    shape = (int(size.findtext("height") or ""), int(size.findtext("width") or ""))
    return Scene(image, shape, *_as_arrays(boxes, labels, hard))


def _as_arrays(boxes: Any, labels: Any, hard: Any) -> tuple[Any, Any, Any]:
    return (
        np.array(boxes, dtype=np.float32).reshape(-1, 4),
        np.array(labels, dtype=np.int64),
        np.array(hard, dtype=np.bool_),
    )


def _read_voc_mask(path: Path) -> Mask:
    """The palette's numbers are the classes."""
    mask = read_numbers(path)
    wrong = np.setdiff1d(mask, [*range(len(VOC_CLASSES) + 1), IGNORED])
    if len(wrong):
        raise DataError(f"{path} has the unknown class {int(wrong[0])}")
    return mask


def _load_coco(folder: Path) -> tuple[Scenes, list[str]]:
    problems: list[str] = []
    splits, classes = [], None
    for split in ("train", "val"):
        files = sorted((folder / "annotations").glob(f"instances_{split}*.json"))
        if not files:
            raise InputMissingError(f"{folder / 'annotations'} holds no instances_{split}*.json.")
        found, names = _read_coco(files[-1], folder, problems)
        if classes is not None and names != classes:
            raise DataError(f"{files[-1]} has other categories than those to train with.")
        splits.append(found)
        classes = names
    assert classes is not None
    return Scenes(folder.resolve().name, classes, train=splits[0], test=splits[1]), problems


def _read_coco(path: Path, folder: Path, problems: list[str]) -> tuple[list[Scene], tuple[str, ...]]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        categories = {int(each["id"]): str(each["name"]) for each in tree["categories"]}
        images = {int(each["id"]): each for each in tree["images"]}
        things: dict[int, list[dict[str, Any]]] = {}
        for each in tree["annotations"]:
            things.setdefault(int(each["image_id"]), []).append(each)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as COCO's annotations ({error!r}).") from error
    if len(categories) > _MOST_CLASSES:
        raise DataError(f"{path} has {len(categories)} categories, and {_MOST_CLASSES} is the most.")
    place = {number: index for index, number in enumerate(sorted(categories))}
    below = folder / path.stem.removeprefix("instances_")
    scenes = []
    for number, image in images.items():
        try:
            scenes.append(_parse_coco(number, image, below, things.get(number, []), place))
        except (ValueError, KeyError, TypeError, OverflowError, DataError) as error:
            problems.append(f"{path}, image {number}: {str(error).rstrip('.')}")
    return scenes, tuple(categories[number] for number in sorted(categories))


def _parse_coco(
    number: int, image: dict[str, Any], below: Path, things: list[dict[str, Any]], place: dict[int, int]
) -> Scene:
    name = Path(str(image["file_name"])).name  # nothing outside the folder
    boxes, labels, hard = [], [], []
    for thing in things:
        if int(thing["category_id"]) not in place:
            raise DataError(f"unknown category {thing['category_id']}")
        left, top, width, height = (float(value) for value in thing["bbox"])
        boxes.append([left, top, left + width, top + height])
        labels.append(place[int(thing["category_id"])])
        hard.append(bool(thing.get("iscrowd", 0)))
    size = (int(image["height"]), int(image["width"]))
    if min(size) < 1 or size[0] * size[1] > MAX_PIXELS:
        raise DataError(f"it is annotated as {size[0]} x {size[1]}")
    return Scene(
        below / name,
        size,
        *_as_arrays(boxes, labels, hard),
        lambda: _paint(size, things, place),
        number=number,
        crowds=True,
    )


def _paint(size: tuple[int, int], things: list[dict[str, Any]], place: dict[int, int]) -> Mask:
    """Instances over the background, large ones first; crowds do not count."""
    try:
        from pycocotools import mask as coco  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        raise UsageError("COCO's masks need a package: pip install '.[transfer]' in selfcon's folder.") from None
    painted = np.zeros(size, np.uint8)
    drawn = []
    for thing in things:
        shape = thing["segmentation"]
        _check_outline(shape, size)
        if isinstance(shape, list):
            coded = coco.merge(coco.frPyObjects(shape, *size))
        else:
            coded = coco.frPyObjects(shape, *size) if isinstance(shape["counts"], list) else shape
        inside = coco.decode(coded).astype(bool)
        label = IGNORED if thing.get("iscrowd") else place[int(thing["category_id"])] + 1
        drawn.append((float(thing.get("area", inside.sum())), inside, label))
    for _, inside, label in sorted(drawn, key=lambda each: -each[0]):
        painted[inside] = label
    return painted


def _check_outline(shape: Any, size: tuple[int, int]) -> None:
    """What pycocotools takes on trust, and crashes at: polygons near the image, and counts for its size."""
    if isinstance(shape, list):
        for polygon in shape:
            corners = np.array(polygon, dtype=np.float64)
            near = np.abs(corners - max(size) / 2) <= _FARTHEST * max(size)  # false for what is no number
            if corners.ndim != 1 or len(corners) < 6 or len(corners) % 2 or not near.all():
                raise ValueError("a polygon is not x, y, x, y, ... of three corners or more, near the image")
        return
    if tuple(shape["size"]) != size:
        raise ValueError(f"counts for an image of {shape['size']}")
    if isinstance(shape["counts"], list) and min(shape["counts"], default=0) < 0:
        raise ValueError("counts below 0")


def _name(scene: Scene) -> str:
    return str(scene.path)
