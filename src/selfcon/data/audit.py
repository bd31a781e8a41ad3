"""A look at a data set before it costs anybody a night: `selfcon data check`."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from selfcon.data.folders import describe_others, describe_split, describe_val, list_strays
from selfcon.data.images import decode
from selfcon.data.packed import hash_content, is_packed
from selfcon.data.scan import in_threads
from selfcon.data.shards import is_sharded
from selfcon.data.source import FileImages, Images, Source
from selfcon.data.sources import list_sources, load
from selfcon.errors import BadImageError, name_some
from selfcon.progress import track

_FEW = 5  # images of a class
_DARK = 32  # of 255; files of 16 bits of which 12 are used come to 15


@dataclass(frozen=True)
class Sample:
    """What is remembered of one image: its size and a hash of its pixels, or why it cannot be read."""

    where: str
    label: int
    size: tuple[int, int] | None = None  # width, height
    digest: bytes = b""
    exif_ignored: bool = False
    problem: str = ""
    flat: bool = False  # of one colour
    dark: bool = False


@dataclass
class Audit:
    """What was found. Problems make the data unusable; warnings are worth a look; notes say how the data are used."""

    name: str
    classes: list[str]
    images: dict[str, int]  # by split
    smallest_class: dict[str, tuple[str, int]]
    largest_class: dict[str, tuple[str, int]]
    sizes: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    duplicates: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """65 where something makes the data unusable, else 0."""
        return 65 if self.problems else 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self) | {"ok": not self.problems}


def check(
    data: str | Path,
    *,
    root: str | Path = "data",
    class_list: str | Path | None = None,
    seed: int = 0,
    download: bool = False,
) -> tuple[Audit, Source]:
    """Read every image of a data set and tell what is wrong or odd about it. Options are those of `load`."""
    problems: list[str] = []
    source = load(data, root=root, class_list=class_list, seed=seed, download=download, problems=problems)
    samples = {split: _scan(images, split) for split, images in source.splits().items()}
    unreadable = [sample.problem for every in samples.values() for sample in every if sample.problem]
    if unreadable:
        problems.append(f"{len(unreadable)} of {sum(map(len, samples.values()))} images cannot be read.")
    counts = {split: _counts(images, source) for split, images in source.splits().items()}
    duplicates, warnings = _find_duplicates(samples, source.classes)
    ignored = sum(sample.exif_ignored for every in samples.values() for sample in every)
    if ignored:
        warnings.append(f"EXIF data of {_count(ignored, 'image')} cannot be read; it was ignored.")
    warnings += _find_blank([sample for every in samples.values() for sample in every])
    few = [name for name, count in counts["train"].items() if 0 < count < _FEW]
    if few:
        warnings.append(f"Fewer than {_FEW} images to train with: {name_some(few)}.")
    named = isinstance(data, str) and data in list_sources()
    notes: list[str] = []
    if not named and Path(data).is_dir() and not is_sharded(Path(data)):
        warnings += _find_unused(Path(data))
        notes = list(filter(None, (describe_split(Path(data), source, seed), describe_val(Path(data)))))
    if not named and Path(data).is_file() and is_packed(Path(data)):
        said, is_now = hash_content(Path(data))
        if said != is_now:
            problems.append(f"{data} is damaged: its contents do not have the hash that was written with them.")
    audit = Audit(
        name=source.name,
        classes=list(source.classes),
        images={split: len(images) for split, images in source.splits().items()},
        smallest_class={split: min(count.items(), key=lambda item: item[1]) for split, count in counts.items()},
        largest_class={split: max(count.items(), key=lambda item: item[1]) for split, count in counts.items()},
        sizes=_sizes(samples),
        problems=problems,
        warnings=warnings,
        unreadable=unreadable,
        duplicates=duplicates,
        notes=notes,
    )
    return audit, source


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _be(number: int) -> str:
    return "is" if number == 1 else "are"


def _scan(images: Images, split: str) -> list[Sample]:
    def look(index: int) -> Sample:
        where, label = images.describe(index), int(images.labels[index])
        try:
            if isinstance(images, FileImages):
                decoded = decode(images.paths[index])
                pixels, ignored = decoded.pixels, decoded.exif_ignored
            else:
                pixels, ignored = images[index], False
        except BadImageError as error:
            return Sample(where, label, problem=str(error))
        height, width = pixels.shape[:2]
        digest = hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=16, key=f"{width}x{height}".encode())
        flat, dark = bool((pixels == pixels[0, 0]).all()), bool(pixels.max() < _DARK)
        return Sample(where, label, (width, height), digest.digest(), ignored, flat=flat, dark=dark and not flat)

    return list(track(in_threads(look, range(len(images)), describe=images.describe), f"Reading {split}", len(images)))


def _counts(images: Images, source: Source) -> dict[str, int]:
    every = np.bincount(images.labels, minlength=len(source.classes))
    return {name: int(count) for name, count in zip(source.classes, every, strict=False)}


def _sizes(samples: dict[str, list[Sample]]) -> dict[str, Any]:
    sizes = Counter(sample.size for every in samples.values() for sample in every if sample.size)
    if not sizes:
        return {}
    widths, heights = sorted({size[0] for size in sizes}), sorted({size[1] for size in sizes})
    (width, height), count = sizes.most_common(1)[0]
    return {
        "different": len(sizes),
        "width": [widths[0], widths[-1]],
        "height": [heights[0], heights[-1]],
        "most_common": {"width": width, "height": height, "images": count},
    }


def _find_blank(samples: list[Sample]) -> list[str]:
    """Images on which there is nothing to see."""
    flat, dark = ([sample for sample in samples if getattr(sample, kind)] for kind in ("flat", "dark"))
    warnings = []
    if flat:
        warnings.append(f"{_count(len(flat), 'image')} {_be(len(flat))} of one colour, such as {flat[0].where}.")
    if dark:
        warnings.append(
            f"{_count(len(dark), 'image')} {_be(len(dark))} nearly black, such as {dark[0].where}: "
            "files of 16 bits that use fewer look so, and should be scaled first."
        )
    return warnings


def _find_unused(folder: Path) -> list[str]:
    """Files of a folder that nothing is learnt from."""
    found = []
    if others := describe_others(folder):
        found.append(others)
    if strays := list_strays(folder):
        found.append(
            f"{_count(len(strays), 'image')} {_be(len(strays))} beside the folders of the classes and "
            f"{'belong' if len(strays) > 1 else 'belongs'} to none, such as {strays[0]}."
        )
    return found


def _find_duplicates(samples: dict[str, list[Sample]], classes: tuple[str, ...]) -> tuple[dict[str, int], list[str]]:
    """Images that are the same pixel for pixel: within a split, across splits, under two labels."""
    groups: dict[bytes, list[tuple[str, Sample]]] = defaultdict(list)
    for split, every in samples.items():
        for sample in every:
            if sample.digest:
                groups[sample.digest].append((split, sample))
    repeated = [group for group in groups.values() if len(group) > 1]
    warnings = []
    found = {}
    for split in samples:
        extra = sum(max(0, sum(place == split for place, _ in group) - 1) for group in repeated)
        found[f"within {split}"] = extra
        if extra:
            group = next(group for group in repeated if sum(place == split for place, _ in group) > 1)
            here, there = [sample.where for place, sample in group if place == split][:2]
            warnings.append(
                f"{_count(extra, 'image')} of {split} {_be(extra)} there twice or more, such as {here} and {there}."
            )
    for earlier, split in itertools.combinations(samples, 2):
        shared = [group for group in repeated if {earlier, split} <= {place for place, _ in group}]
        count = sum(place == split for group in shared for place, _ in group)
        found[f"{split} in {earlier}"] = count
        if count:
            here, there = (
                next(sample.where for place, sample in shared[0] if place == each) for each in (split, earlier)
            )
            warnings.append(
                f"{_count(count, 'image')} of {split} {_be(count)} in {earlier} too, such as {here} (there {there}): "
                f"accuracy will look better than it is."
            )
    conflicts = [group for group in repeated if len({sample.label for _, sample in group}) > 1]
    found["under two labels"] = len(conflicts)
    if conflicts:
        (_, sample), *others = conflicts[0]
        other = next(each for _, each in others if each.label != sample.label)
        names = name_some([classes[sample.label], classes[other.label]])
        warnings.append(
            f"{_count(len(conflicts), 'image')} {_be(len(conflicts))} there under two labels, "
            f"such as {sample.where} ({names})."
        )
    return found, warnings
