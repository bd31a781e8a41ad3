"""The encoder at other tasks, in two processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import selfcon
from selfcon.training.distributed import join
from tests.data.test_scenes import write_voc
from tests.distributed.processes import start_processes
from tests.workflows.conftest import write_stripes

SCENES: dict[str, Any] = {"data": "voc", "epochs": 2, "batch_size": 4, "device": "cpu"}
CORRUPTION: dict[str, Any] = {"corruptions": ["contrast"], "severities": [1], "samples": 9, "device": "cpu"}


def work(rank: int, folder: str) -> None:
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29713"}
    with join(torch.device("cpu")):
        found = {
            "segment": selfcon.transfer.segment("run", image_size=32, out="two-segment", **SCENES),
            "detect": selfcon.transfer.detect("run", image_size=64, out="two-detect", **SCENES),
            "corruption": selfcon.transfer.corruption("run", out="two-corruption", **CORRUPTION),
        }
    Path(f"found-{rank}.json").write_text(json.dumps(found))


def test_two_processes_share_the_work_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("segmentation_models_pytorch", "pycocotools", "imagecorruptions"):
        pytest.importorskip(package)
    write_stripes(tmp_path / "stripes.npz", side=32, train=64)
    small: Any = {"width": 0.125, "epochs": 1, "batch_size": 32, "probe.epochs": 2, "device": "cpu"}
    selfcon.fit(data=str(tmp_path / "stripes.npz"), out=tmp_path / "run", **small)
    write_voc(tmp_path / "voc")
    sets = tmp_path / "voc" / "VOCdevkit" / "VOC2012" / "ImageSets"
    for task in ("Segmentation", "Main"):
        (sets / task / "train.txt").write_text("2012_0\n2012_1\n" * 2)
    start_processes(work, (str(tmp_path),), nprocs=2)
    first, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    for each in (*first.values(), *second.values()):
        each.pop("seconds", None)
    assert first == second
    monkeypatch.chdir(tmp_path)
    assert selfcon.transfer.corruption("run", **CORRUPTION)["errors"] == first["corruption"]["errors"]
    steps = [json.loads(line) for line in (tmp_path / "two-detect" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    alone = selfcon.transfer.detect("run", image_size=64, out="one-detect", **SCENES)
    assert alone["scenes"] == first["detect"]["scenes"]
