"""Stage two: linear classifiers on the frozen encoder, one for each exit, all from one forward."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from selfcon.config import Optim, Settings
from selfcon.data.policies import Policy
from selfcon.data.resident import Resident
from selfcon.data.split import Batch, Split
from selfcon.evaluation.accuracy import with_ensemble
from selfcon.losses.gather import weigh_share
from selfcon.losses.objective import raised
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.training.distributed import World
from selfcon.training.loop import memory_format
from selfcon.training.trainer import Stage

_RATE = 8.0  # for features of length 1
_MEASURED = 512  # images


@dataclass(frozen=True)
class _Scale:
    """Features are long, most of all by what is common to all of them: that is taken out, and the rest made short."""

    mean: Tensor | float
    length: float


_AS_THEY_ARE = _Scale(0.0, 1.0)


class Probing(Stage):
    """Trains the classifiers alone. They share nothing, so the sum of their losses trains each as if by itself."""

    def __init__(
        self,
        net: MultiExitNetwork,
        train: Split,
        test: Split,
        *,
        classes: int,
        settings: Settings,
        policy: Policy,
        size: int,
        world: World,
    ) -> None:
        self.world = world
        probe = settings.probe
        self.name = "probe"
        self.net = net.requires_grad_(False).eval()
        generator = torch.Generator().manual_seed(settings.seed)
        self.module = nn.ModuleDict({name: _linear(net.width, classes, generator) for name in net.names})
        self.module.to(train.device, net.dtype)
        self.epochs, self.batch_size, self.samples = settings.probe_epochs, probe.batch_size, len(train)
        self.lr, self.schedule, self.seed = probe.lr or _RATE, probe.schedule, settings.seed
        self.optim = Optim(name="sgd", momentum=probe.momentum, weight_decay=probe.weight_decay)
        self._train, self._policy, self._size = train, policy, size
        self._balanced = settings.sampler == "balanced"
        self._watched = test if settings.watch.test_in_probe else None
        self._precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision)
        self._scales = dict.fromkeys(net.names, _AS_THEY_ARE) if probe.lr is not None else self._measure()

    def _measure(self) -> dict[str, _Scale]:
        """Of each exit's features, over some training images."""
        train = self._train
        if isinstance(train, Resident) and train.spread:
            batch = next(train.plain_batches(batch_size=_MEASURED, size=self._size, part=self.world))
        else:
            rows = torch.linspace(0, len(train) - 1, min(_MEASURED, len(train)), dtype=torch.double)
            rows = rows.round().long().to(train.device)
            batch = train.batch(rows, Policy(), seed=0, epoch=0, size=self._size)
        with torch.no_grad():
            features = self.net(self._arranged(batch.images)).features
        scales = {}
        for name, each in features.items():
            mean = self.world.mean(raised(each).mean(0))
            square = self.world.mean((raised(each) - mean).square().sum(1).mean())
            scales[name] = _Scale(mean, max(float(square) ** 0.5, 1e-6))
        return scales

    def unwrap(self, module: nn.Module) -> nn.Module:
        """The classifiers, for features as they are."""
        found = copy.deepcopy(module)
        with torch.no_grad():
            for name, scale in self._scales.items():
                linear = found.get_submodule(name)
                assert isinstance(linear, nn.Linear)
                linear.weight.div_(scale.length)
                linear.bias.sub_(linear.weight @ (scale.mean * torch.ones_like(linear.weight[0])))
        return found

    def _classify(self, name: str, features: Tensor) -> Tensor:
        scale = self._scales[name]
        logits: Tensor = self.module.get_submodule(name)((raised(features) - scale.mean) / scale.length)
        return logits

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        # Epochs of the probe continue those of the pretraining's draws nowhere: another seed keeps them apart.
        return self._train.batches(
            self._policy,
            batch_size=self.batch_size,
            seed=self.seed + 1,
            epoch=epoch,
            size=self._size,
            first=first,
            part=self.world,
            balanced=self._balanced,
        )

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(self._device, dtype=self._precision, enabled=self._precision is not None):
            features = self.net(self._arranged(images)).features
        losses = [cross_entropy(self._classify(name, features[name]), labels) for name in features]
        return weigh_share(torch.stack(losses).sum(), len(labels), None)

    def measure(self, epoch: int, module: nn.Module) -> dict[str, float]:
        if self._watched is None:
            return {}
        right: dict[str, int] = {}
        with torch.no_grad():
            for batch in self._watched.plain_batches(batch_size=self.batch_size, size=self._size):
                features = self.net(self._arranged(batch.images)).features
                logits = with_ensemble({name: self._classify(name, features[name]) for name in features})
                for name, each in logits.items():
                    right[name] = right.get(name, 0) + int((each.argmax(1) == batch.labels).sum())
        return {f"test_{name}": 100 * count / len(self._watched) for name, count in right.items()}

    def _arranged(self, images: Tensor) -> Tensor:
        return images.to(self.net.dtype).contiguous(memory_format=memory_format(images.device))

    @property
    def _device(self) -> str:
        return self._train.device.type


def _linear(width: int, classes: int, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(width, classes)
    with torch.no_grad():
        layer.weight.normal_(0, 0.01, generator=generator)
        layer.bias.zero_()
    return layer
