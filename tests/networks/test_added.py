"""Networks of one's own: what they need not say of themselves, and the sentence where it must be said."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import timm
import torch
import torchvision
from timm.models import _registry
from torch import Tensor, nn

import selfcon
from selfcon.errors import InputMissingError, UsageError
from selfcon.networks.added import check_there, describe_network, is_added

SCRIPT = """
from torch import nn

class Block(nn.Sequential):
    def __init__(self, a, b):
        super().__init__(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU())

class Act(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Block(3, 8), Block(8, 16))

    def forward(self, x):
        return self.body(x)

def actnet(pretrained=False, **options):
    return Act()
"""


def add_script(text: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of a script that adds `actnet`, as if it had just been run."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(_registry._model_entrypoints, "actnet", module.actnet)
    return module


class Bare(nn.Module):
    """Maps of 8 channels, or whatever is made of them."""

    def __init__(self, then: Callable[[Tensor], Any] = lambda x: x, **told: Any) -> None:
        super().__init__()
        self.body, self.then = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU()), then
        for name, value in told.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.then(self.body(x))


@pytest.mark.parametrize("then", [lambda x: x, lambda x: x.mean((2, 3))], ids=["maps", "features"])
def test_a_module_that_says_nothing_of_itself(
    then: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_registry._model_entrypoints, "bare", lambda pretrained=False, **_: Bare(then))
    images = torch.randn(2, 3, 16, 16)
    for net in (selfcon.create_model("bare", num_classes=3), selfcon.create_model(Bare(then), num_classes=3)):
        out = net(images)
        assert (net.width, out.logits["backbone"].shape) == (8, (2, 3))
        assert torch.equal(out.features["backbone"], net.to_timm()(images).reshape(2, 8, -1).mean(2))


def test_a_network_of_torchvision() -> None:
    encoder = torchvision.models.resnet18()
    encoder.fc = nn.Identity()
    encoder.feature_info = [{"num_chs": 64 * 2**stage, "module": f"layer{stage + 1}"} for stage in range(4)]
    net = selfcon.create_model(encoder, exits="2:fc")
    assert net.encoder is encoder
    out = net(torch.randn(2, 3, 32, 32))
    assert {name: each.shape for name, each in out.features.items()} == {"backbone": (2, 512), "exit2": (2, 512)}
    with pytest.raises(UsageError, match="width cannot be set: this ResNet is a network already"):
        selfcon.create_model(encoder, width=0.5)


@pytest.mark.parametrize(
    ("net", "options", "words"),
    [
        (Bare(), {"exits": "1:fc"}, r"does not tell where its stages end \(feature_info\), .* supcon and ce need none"),
        (Bare(lambda x: (x, x)), {}, r"gives a tuple, where features \[B, C\] are wanted"),
        (Bare(lambda x: x.flatten(2)), {}, r"gives the shape \[1, 8, 64\], where features"),
        (Bare(num_features=5), {}, "gives 8 numbers for an image, and its num_features says 5: with num_classes=0"),
        (
            Bare(nn.Sequential(nn.Flatten(), nn.Linear(7, 7))),
            {},
            "has no num_features, which says how wide .* 16 pixels",
        ),
        (Bare(feature_info=[{"num_chs": 8}] * 2), {"exits": "1:fc"}, "says of each stage the module that ends it"),
    ],
)
def test_what_must_be_said(net: nn.Module, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        selfcon.create_model(net, image_size=16, **options)(torch.randn(2, 3, 16, 16))


def test_all_that_timm_passes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_registry._model_entrypoints, "bare", lambda num_classes: Bare())
    with pytest.raises(UsageError, match=r"bare does not take these options .* as \*\*options"):
        selfcon.create_model("bare")


def test_it_is_known_by_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_added("resnet18")
    assert describe_network("resnet18", {}) is None
    add_script(SCRIPT, tmp_path / "one.py", monkeypatch)
    assert is_added("actnet")
    first = describe_network("actnet", {})
    assert first is not None
    assert list(first) == ["Act", "Block", "actnet"]
    add_script("# elsewhere\n" + SCRIPT, tmp_path / "two.py", monkeypatch)
    assert describe_network("actnet", {}) == first
    add_script(SCRIPT.replace("nn.ReLU", "nn.GELU"), tmp_path / "three.py", monkeypatch)
    other = describe_network("actnet", {})
    assert other is not None
    assert [name for name in first if first[name] != other[name]] == ["Block"]
    check_there("actnet", first, "runs/x")
    monkeypatch.delitem(_registry._model_entrypoints, "actnet")
    assert not timm.is_model("actnet")
    with pytest.raises(InputMissingError, match=r"The network actnet of runs/x was added by a script: .*SCRIPT\.py"):
        check_there("actnet", first, "runs/x")
