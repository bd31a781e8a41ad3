"""Images that are spread over processes, and tar files, give the batches of one process that holds all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import selfcon.data
from selfcon.data import resident
from selfcon.data.parts import Part
from selfcon.data.policies import POLICIES
from selfcon.errors import BadImageError, UsageError
from tests.distributed.processes import start_processes
from tests.distributed.test_training import COMMAND
from tests.workflows.conftest import write_stripes


def work(rank: int, size: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    part = Part(rank, size)
    images = selfcon.data.load(Path(folder) / "stripes.npz").train
    whole = resident.make_resident(images, part=part)
    assert whole.spread is None
    resident.has_room = lambda device, wanted: False
    spread = resident.make_resident(images, part=part)
    assert spread.spread == part
    assert len(spread.pixels) == len(range(rank, len(images), size))
    assert torch.equal(spread.mean, whole.mean)
    assert torch.equal(spread.std, whole.std)
    assert spread.fingerprint() == whole.fingerprint()
    seen = []
    for epoch in range(2):
        ours, theirs = (
            list(data.batches(POLICIES["standard"], batch_size=10, seed=3, epoch=epoch, views=2, first=1, part=part))
            for data in (spread, whole)
        )
        assert len(ours) == len(theirs)
        for mine, expected in zip(ours, theirs, strict=True):
            assert all(torch.equal(getattr(mine, name), getattr(expected, name)) for name in vars(mine))
        seen.append(torch.cat([batch.samples for batch in ours]))
    for batch_size in (4, 40):
        ours, theirs = (list(data.plain_batches(batch_size=batch_size, part=part)) for data in (spread, whole))
        for mine, expected in zip(ours, theirs, strict=True):
            assert all(torch.equal(getattr(mine, name), getattr(expected, name)) for name in vars(mine))
    small = resident.make_resident(images.take(np.array([4])), part=part)  # fewer images than processes
    for data in (small, resident.make_resident(images.take(np.array([4])))):
        assert [len(batch.samples) for batch in data.plain_batches(batch_size=4, part=part)] == [int(rank == 0)]
    bad = selfcon.data.load(Path(folder) / "tars").train  # the image of one process cannot be read
    with pytest.raises(BadImageError, match="is not an image"):
        resident.make_resident(bad, size=16, part=part)
    with pytest.raises(UsageError, match="asked for by all"):
        next(spread.batches(POLICIES["standard"], batch_size=10, seed=3, epoch=0))
    few = torch.tensor([3, 0, 46, 3])
    assert torch.equal(spread.take(few).pixels, whole.pixels[few])
    torch.save(seen, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_spread_images_give_the_same_batches(size: int, tmp_path: Path) -> None:
    write_stripes(tmp_path / "stripes.npz", train=47, test=5)
    tars = selfcon.data.write_shards(selfcon.data.load(tmp_path / "stripes.npz"), tmp_path / "tars", 100)
    whole = (tars / "train-000000.tar").read_bytes()
    place = whole.index(b"000000007.png") + 512
    (tars / "train-000000.tar").write_bytes(whole[:place] + b"no image" + whole[place + 8 :])
    start_processes(work, (size, str(tmp_path)), nprocs=size)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for epoch in range(2):
        samples = torch.cat([part[epoch] for part in parts])
        assert len(samples) == len(samples.unique()) == 37  # all but the first batch, none twice


_SPREAD = """
import sys
from selfcon.data import resident
resident.has_room = lambda device, wanted: False
from selfcon.cli import main
sys.argv[0] = "selfcon"
main()
"""


@pytest.mark.slow
def test_tar_files_and_spread_images_train_as_one_file_does(tmp_path: Path) -> None:
    """With two processes, from tar files of which each decodes half: the losses of one process with the .npz."""
    write_stripes(tmp_path / "stripes.npz", train=98, test=37)
    source = selfcon.data.load(tmp_path / "stripes.npz")
    selfcon.data.write_shards(source, tmp_path / "tars", 20)
    (tmp_path / "spread.py").write_text(_SPREAD)
    size = str(source.train[0].shape[0])
    command = [*COMMAND, "--image-size", size, "--watch.knn_every", "1", "--watch.knn_samples", "20"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    of_tars = ["tars" if word == "stripes.npz" else word for word in command]
    for line in (
        [sys.executable, "-m", "selfcon", *command, "--out", "one"],
        [*launcher, "spread.py", *of_tars, "--out", "two"],
    ):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(line, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "spread over 2 processes" in done.stderr
    one, two = (
        [json.loads(text) for text in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]
        for out in ("one", "two")
    )
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-5)
    assert [line.get("knn") for line in two] == pytest.approx([line.get("knn") for line in one], abs=6)
    facts = [json.loads((tmp_path / out / "data.json").read_text()) for out in ("one", "two")]
    places = [Path(each.pop("place")).name for each in facts]
    assert places == ["stripes.npz", "tars"]
    assert facts[0] == facts[1]
