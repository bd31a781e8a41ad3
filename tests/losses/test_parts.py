"""Modules in the fields of a method: whose they are, and what may not stand beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

import selfcon
from selfcon.errors import UsageError
from selfcon.losses import methods
from selfcon.losses.parts import find_parts, with_own_parts
from selfcon.losses.temperature import LearnedTemperature
from selfcon.training.checkpoint import plain


@dataclass(frozen=True, kw_only=True)
class Own(selfcon.Method):
    part: Any = None
    kind: type = nn.Linear  # a class is no module

    def loss(self, features: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        return features.mean()


def own(part: Any) -> Own:
    return Own(name="own", paper="", uses_exits=False, part=part)


@pytest.fixture(autouse=True)
def _nothing_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfcon.losses.methods._METHODS", dict(methods._METHODS))
    monkeypatch.setattr("selfcon.losses.methods._ADDED", {})


def test_parts_are_copied_whole() -> None:
    linear = nn.Linear(2, 3)
    method = own(nn.ModuleList([linear, nn.Sequential(linear), LearnedTemperature(0.1)]))
    assert list(find_parts(method)) == ["part"]
    assert not find_parts(selfcon.get_method("selfcon"))
    assert with_own_parts(selfcon.get_method("selfcon")) is selfcon.get_method("selfcon")
    copied = with_own_parts(method, torch.device("cpu"), torch.float64).part
    assert linear.weight.dtype == torch.float32
    assert copied[0].weight.dtype == torch.float64
    assert copied[0] is copied[1][0]  # what is shared stays so
    assert [parameter.no_decay for parameter in copied.parameters()] == [False, False, True]
    assert copied[0].weight is not linear.weight


def test_what_is_added_is_what_it_was_then() -> None:
    linear = nn.Linear(2, 3)
    before = linear.weight.detach().clone()
    assert selfcon.add_method(own(linear)).part is linear  # type: ignore[attr-defined]
    with torch.no_grad():
        linear.weight += 1
    assert torch.equal(selfcon.get_method("own").part.weight, before)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (nn.Parameter(torch.zeros(3)), "a tensor that is trained"),
        (torch.zeros(3, requires_grad=True), "a tensor that is trained"),
        ((1, (nn.Parameter(torch.zeros(3)),)), "a tensor that is trained"),
        ([1, 2], "a list, which can change"),
        ({"a": 1}, "a dict, which can change"),
        ({1, 2}, "a set, which can change"),
        ((nn.Linear(2, 2),), "a module among other things"),
    ],
)
def test_what_would_be_neither_trained_nor_kept(part: Any, words: str) -> None:
    with pytest.raises(UsageError, match=f"The field part of own holds {words}.*: put it into an nn.Module"):
        selfcon.add_method(own(part))
    assert "own" not in selfcon.list_methods()


@pytest.mark.parametrize("part", [0.1, (1, "a"), frozenset("ab"), torch.zeros(3), lambda x: x])
def test_what_stays_as_it_is(part: Any) -> None:
    selfcon.add_method(own(part))


_SCRIPT = """
import json, sys
from dataclasses import dataclass
import torch
from torch import nn
import selfcon
from selfcon.losses.methods import describe_added

class Margin(nn.Module):
    def __init__(self, margin):
        super().__init__()
        self.margin = margin
        self.inner = nn.Linear(4, 2, bias={bias})
        self.register_buffer("queue", torch.zeros(3, dtype=torch.bfloat16))
    def forward(self, x):
        return self.inner(x) {sign} self.margin

@dataclass(frozen=True, kw_only=True)
class Own(selfcon.Method):
    head: nn.Module
    def loss(self, features, labels=None, **options):
        return self.head(features).mean()

torch.manual_seed({seed})
selfcon.add_method(Own(name="own", paper="", uses_exits=False, head=Margin({margin})))
print(json.dumps(describe_added("own")))
"""


@pytest.mark.slow
def test_a_module_is_known_again(tmp_path: Path) -> None:
    """In another process: by its class's text, by what it was told, and by the numbers it begins with."""
    plain = {"margin": 0.5, "seed": 0, "bias": True, "sign": "-"}
    cases = [
        plain,
        plain,
        *({**plain, name: value} for name, value in (("margin", 0.4), ("seed", 1), ("sign", "+"))),
    ]
    told = []
    for case in cases:
        (tmp_path / "own.py").write_text(_SCRIPT.format(**case))
        done = subprocess.run([sys.executable, tmp_path / "own.py"], capture_output=True, text=True, check=True)
        told.append(json.loads(done.stdout))
    assert told[0] == told[1]
    assert all(each["head"] != told[0]["head"] for each in told[2:])
    assert told[2]["head"]["tensors"] == told[0]["head"]["tensors"] != told[3]["head"]["tensors"]


def test_what_is_shared_is_kept(tmp_path: Path) -> None:
    linear = nn.Linear(2, 3)
    tied = nn.ModuleList([linear, linear])
    kept = plain(tied.state_dict())
    (tmp_path / "kept.safetensors").write_bytes(save(kept))
    again = nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3)])
    again.load_state_dict(load_file(tmp_path / "kept.safetensors"))
    assert all(torch.equal(each.weight, linear.weight) for each in again)  # type: ignore[arg-type]
