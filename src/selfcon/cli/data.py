"""`selfcon data check` and `selfcon data pack`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfcon.errors import UsageError

if TYPE_CHECKING:
    from selfcon.data import Audit

app = typer.Typer(help="Look at a data set, or decode it once for all.", rich_markup_mode=None)

Data = Annotated[str, typer.Argument(help="A name (digits, cifar100, ...), a folder, an .npz or a packed file.")]
DataRoot = Annotated[Path, typer.Option(help="Where data sets that go by a name lie.")]
ClassList = Annotated[Path | None, typer.Option(help="For imagenet100: a file with one class a line.")]
Seed = Annotated[int, typer.Option(help="Decides how a single folder is split into training and test images.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


@app.command()
def check(
    data: Data,
    data_root: DataRoot = Path("data"),
    class_list: ClassList = None,
    seed: Seed = 0,
    sheet: Annotated[Path | None, typer.Option(help="Where the contact sheet goes [default: NAME-sheet.png].")] = None,
    as_json: AsJson = False,
) -> int:
    """Read every image; show classes, counts, sizes and what is wrong; draw a contact sheet. Exit code 65 for bad data.

    Example: selfcon data check my-birds
    """
    import selfcon.data

    audit, source = selfcon.data.check(data, root=data_root, class_list=class_list, seed=seed)
    drawn = selfcon.data.draw_contact_sheet(source, sheet or Path(f"{_file_name(source.name)}-sheet.png"))
    if as_json:
        typer.echo(json.dumps(audit.to_dict() | {"sheet": str(drawn)}, indent=2, ensure_ascii=False))
    else:
        _print_audit(audit, drawn)
    return audit.exit_code


@app.command()
def pack(
    data: Data,
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    data_root: DataRoot = Path("data"),
    class_list: ClassList = None,
    seed: Seed = 0,
    bad_images: Annotated[str, typer.Option(help="error: stop at the first; skip: leave out up to 0.1 %.")] = "error",
    download: Annotated[
        bool, typer.Option("--download", help="Let a data set that goes by a name be downloaded.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    as_json: AsJson = False,
) -> int:
    """Decode a data set once into one file that opens at once.

    Example: selfcon data pack cifar100 cifar100.pack, then --data cifar100.pack wherever data is asked for.
    """
    import selfcon.data

    if out.exists() and not overwrite:
        raise UsageError(f"{out} is already there: choose another name, or replace it with --overwrite.")
    source = selfcon.data.load(
        data,
        root=data_root,
        class_list=class_list,
        seed=seed,
        download=download,
        bad_images=bad_images,  # type: ignore[arg-type]
    )
    selfcon.data.pack(source, out)
    result: dict[str, Any] = {
        "file": str(out),
        "bytes": out.stat().st_size,
        "classes": len(source.classes),
        "images": {split: len(images) for split, images in source.splits().items()},
    }
    if as_json:
        typer.echo(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        counts = " and ".join(f"{count:,} {split}" for split, count in result["images"].items())
        typer.echo(
            f"Packed {counts} images of {result['classes']} classes into {out} ({result['bytes'] / 1e6:,.1f} MB)."
        )
        typer.echo(f"Use it as: --data {out}")
    return 0


def _print_audit(audit: Audit, sheet: Path) -> None:
    typer.echo(f"{audit.name}: {len(audit.classes)} classes")
    for split, count in audit.images.items():
        (low_name, low), (high_name, high) = audit.smallest_class[split], audit.largest_class[split]
        span = f"{low:,} of each class" if low == high else f"{low:,} ({low_name}) to {high:,} ({high_name}) of a class"
        typer.echo(f"  {split:6s}{count:9,} images, {span}")
    if audit.sizes:
        common = audit.sizes["most_common"]
        if audit.sizes["different"] == 1:
            typer.echo(f"  all of {common['width']} x {common['height']} pixels")
        else:
            (narrow, wide), (low, high) = audit.sizes["width"], audit.sizes["height"]
            typer.echo(
                f"  {audit.sizes['different']:,} sizes: {narrow} to {wide} wide, {low} to {high} high; "
                f"most often {common['width']} x {common['height']} ({common['images']:,})"
            )
    for kind, sentences in (("wrong", audit.problems), ("note", audit.warnings)):
        for sentence in sentences:
            typer.echo(f"  {kind}: {sentence}")
    for sentence in audit.unreadable[:20]:
        typer.echo(f"    {sentence}")
    if len(audit.unreadable) > 20:
        typer.echo(f"    and {len(audit.unreadable) - 20} more: --json lists them all")
    typer.echo(f"  contact sheet: {sheet}")
    typer.echo("This data set can be used." if not audit.problems else "This data set cannot be used as it is.")


def _file_name(name: str) -> str:
    """A name without what a path could trip over."""
    return "".join(letter if letter.isalnum() or letter in "-_. " else "_" for letter in name).strip(". ") or "data"
