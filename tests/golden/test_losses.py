"""The losses of the first 20 steps of every method and every family of networks are what they were.

`SELFCON_UPDATE_GOLDEN=1 pytest tests/golden` writes losses.json anew, after a change that is meant to change them.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import selfcon
from selfcon.config import make_settings
from selfcon.training.trainer import Trainer
from selfcon.workflows.pipeline import make_pretraining
from selfcon.workflows.task import prepare
from tests.workflows.conftest import write_stripes

KEPT = Path(__file__).parent / "losses.json"
CASES: dict[str, dict[str, Any]] = {
    **{name: {"method": name, "model": "resnet18"} for name in selfcon.list_methods()},
    **{f"selfcon, {model}": {"model": model, "image_size": 32} for model in ("resnet50", "vgg16_bn", "wrn16_8")},
    "selfcon, timm's convnext": {"model": "convnext_atto", "width": 1.0, "image_size": 32, "stem": "large"},
    "selfcon, timm's transformer": {"model": "vit_tiny_patch16_224", "width": 1.0, "image_size": 32, "stem": "large"},
}


@pytest.mark.medium
@pytest.mark.parametrize("name", CASES)
def test_golden_losses(name: str, tmp_path: Path) -> None:
    write_stripes(tmp_path / "stripes.npz")
    given = {"data": str(tmp_path / "stripes.npz"), "width": 0.125, "batch_size": 12, "lr": 0.01, "optim.name": "sgd"}
    given |= {"schedule.kind": "cosine"}
    # In float64 other processors give the same digits, also after 20 steps.
    settings = make_settings({**given, "precision": "fp64", "watch.knn_every": 0, **CASES[name]})
    stage = make_pretraining(prepare(settings, torch.device("cpu")), lambda *_: None)
    trainer = Trainer(stage, torch.device("cpu"))
    sums = [0.0]
    batches = itertools.chain.from_iterable(stage.batches(epoch, 0) for epoch in itertools.count())
    for step, batch in enumerate(itertools.islice(batches, 20)):
        trainer.update(batch.images, batch.labels, step)
        sums.append(float(trainer.loss_sum) / trainer.stage.batch_size)
    losses = [after - before for before, after in itertools.pairwise(sums)]
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if os.environ.get("SELFCON_UPDATE_GOLDEN"):
        kept[name] = [round(loss, 9) for loss in losses]
        KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    assert losses == pytest.approx(kept[name], rel=1e-5)
    assert losses[0] != losses[-1]
