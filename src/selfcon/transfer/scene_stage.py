"""What training on scenes has in common, whatever a network has to say of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfcon.config import Optim, Schedule
from selfcon.data.random import Stream, draw_words, permute, to_uniform
from selfcon.data.scan import in_threads
from selfcon.data.scenes import Scene
from selfcon.data.split import Batch, cut
from selfcon.errors import UsageError
from selfcon.training.distributed import ALONE, World
from selfcon.training.trainer import Stage


@dataclass(frozen=True)
class Plan:
    """How long and how fast a network learns."""

    epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    precision: str
    seed: int


class SceneStage(Stage):
    """Trains a network on scenes, each made into an image and a target by draws of its own."""

    draws: int  # that one scene takes

    def __init__(
        self, module: nn.Module, scenes: Sequence[Scene], plan: Plan, device: torch.device, world: World = ALONE
    ) -> None:
        self.module, self.world = module, world
        # A smaller last batch is left out: normalisation over a single image would fail, and so would no image at all.
        self.samples = len(scenes) // plan.batch_size * plan.batch_size
        if not self.samples:
            raise UsageError(f"A batch of {plan.batch_size} is more than the {len(scenes)} scenes to train with.")
        if plan.batch_size < world.size:
            raise UsageError(f"A batch of {plan.batch_size} cannot be shared by {world.size} processes.")
        self.epochs, self.batch_size, self.lr, self.seed = plan.epochs, plan.batch_size, plan.lr, plan.seed
        self.optim = Optim(name="adamw", weight_decay=plan.weight_decay)
        self.schedule = Schedule(warmup_epochs=0)
        self.precision = plan.precision
        self._scenes, self._device = scenes, device

    @abstractmethod
    def make(self, scene: Scene, uniform: Sequence[float]) -> tuple[Tensor, Tensor]:
        """The image and the target of a scene; equal draws make equal ones."""

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        self.module.train()
        order = permute(len(self._scenes), seed=self.seed, epoch=epoch)[: self.samples]
        for samples in cut(order, self.batch_size)[first:]:
            own = self.world.split(samples)[self.world.rank]
            words = draw_words(own, seed=self.seed, epoch=epoch, stream=Stream.AUGMENT, words=self.draws)
            pairs = list(zip(own.tolist(), to_uniform(words).tolist(), strict=True))
            made = list(in_threads(lambda pair: self.make(self._scenes[pair[0]], pair[1]), pairs))
            images, targets = (torch.stack(parts).to(self._device) for parts in zip(*made, strict=True))
            yield Batch(images, targets, own)
