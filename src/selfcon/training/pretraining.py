"""Stage one: the encoder, by a contrastive method; or encoder and classifier together, by a one-stage method."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from selfcon.config import Settings
from selfcon.data.mixing import cut_mix
from selfcon.data.policies import Policy
from selfcon.data.random import Stream, permute
from selfcon.data.split import Batch, Split
from selfcon.errors import SelfconWarning
from selfcon.evaluation import knn
from selfcon.evaluation.accuracy import evaluating
from selfcon.losses.methods import Method
from selfcon.losses.objective import Tally
from selfcon.losses.parts import find_parts, with_own_parts
from selfcon.losses.temperature import LearnedTemperature
from selfcon.networks.multi_exit import MultiExitNetwork, Output
from selfcon.training.cached import cached_loss, uses_batch_norm
from selfcon.training.distributed import World
from selfcon.training.loop import memory_format
from selfcon.training.trainer import Stage


class Trained(nn.Module):
    """A network and what is trained with it for the sake of the loss: a temperature, modules of the method."""

    def __init__(self, net: MultiExitNetwork, temperature: LearnedTemperature | None, parts: list[nn.Module]) -> None:
        super().__init__()
        self.net = net
        if temperature is not None:  # by the name that it has in checkpoints
            self.log_temperature = temperature.log_temperature
        self.parts = nn.ModuleList(parts)


class Pretraining(Stage):
    """Trains the whole network with the method's loss."""

    def __init__(
        self,
        net: MultiExitNetwork,
        train: Split,
        held_out: Split | None,
        *,
        method: Method,
        settings: Settings,
        policy: Policy,
        size: int,
        keep_encoder: Callable[[int, nn.Module], None],
        world: World,
    ) -> None:
        self.world = world
        self.name = "pretrain" if method.stages == 2 else "train"
        self.net = net
        device = next(net.parameters()).device
        self._learned: LearnedTemperature | None = None
        if settings.loss.learn_temperature:
            self._learned = LearnedTemperature(settings.loss.temperature, device)
        self._method = with_own_parts(method, device, net.dtype)
        parts = list(find_parts(self._method).values())
        self.module = Trained(net, self._learned, parts) if parts or self._learned is not None else net
        self._parts = nn.ModuleList(parts)
        if parts and world.size > 1:  # a script may have drawn others in every process
            self._parts.load_state_dict(world.broadcast(self._parts.state_dict(), device))
        self._tally = Tally.on(device)
        self.counts = {"anchors_left_out": self._tally.count("left_out")}
        self.epochs, self.batch_size, self.samples = settings.epochs, settings.batch_size, len(train)
        self.lr, self.optim, self.schedule = settings.learning_rate, settings.optim, settings.schedule
        self.slow_start = method.stages == 2
        self.precision, self.ema, self.seed = settings.precision, settings.ema, settings.seed
        self._train, self._held_out = train, held_out
        self._balanced = settings.sampler == "balanced"
        self._settings, self._policy, self._size = settings, policy, size
        self._keep_encoder = keep_encoder
        if settings.watch.knn_every:
            self._watched = self._choose_watched()
        self.recordable = settings.piece is None
        if not self.recordable and uses_batch_norm(net):
            warnings.warn(
                f"Batch normalisation sees the {settings.piece} samples of a piece, not the whole batch: "
                f"--norm group makes pieces exact.",
                SelfconWarning,
                stacklevel=2,
            )

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        self.net.train()
        return self._train.batches(
            self._policy,
            batch_size=self.batch_size,
            seed=self.seed,
            epoch=epoch,
            views=self._method.views,
            size=self._size,
            first=first,
            part=self.world,
            balanced=self._balanced,
        )

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        settings, views = self._settings, self._method.views
        loss_of = partial(
            self._method.loss_from_output,
            temperature=settings.loss.temperature if self._learned is None else self._learned(),
            alpha=settings.loss.alpha,
            base_temperature=settings.loss.base_temperature,
            implementation=settings.loss.implementation,
            gather="ring" if settings.loss.ring else None,
        )
        if settings.cutmix:
            images, others, share = cut_mix(
                images, labels, self.step, probability=settings.cutmix, seed=self.seed, views=views
            )

            def loss(output: Output) -> Tensor:
                whole = loss_of(output, labels, tally=self._tally)  # an anchor is counted once
                return share * whole + (1 - share) * loss_of(output, others)
        else:

            def loss(output: Output) -> Tensor:
                return loss_of(output, labels, tally=self._tally)

        images = images.to(self.net.dtype).contiguous(memory_format=memory_format(images.device))
        if settings.piece is None:
            return loss(self.net(images))
        samples, world = len(labels), self.world  # a full share says nothing: those of others may be smaller by one
        shares = -world.most(-samples, labels.device), world.most(samples, labels.device)
        world.level(self._parts)  # as DistributedDataParallel does it, which is not asked here
        return cached_loss(
            self.net,
            images,
            loss,
            views=views,
            piece=settings.piece,
            shares=shares,
            beside=[each for each in self._parts.parameters() if each.requires_grad],
        )

    def loss_of_nothing(self) -> float:
        """What the loss of a full batch is where all features are equal, so that nothing is told apart."""
        count = min(self.batch_size, self.samples)
        labels = self._train.labels[torch.linspace(0, self.samples - 1, count, dtype=torch.double).long()].cpu()
        features = torch.ones(count, self._method.views, 1 + len(self.net.exits), 2)
        loss = self._settings.loss
        return float(
            self._method.loss(
                features,
                labels,
                temperature=loss.temperature,
                alpha=loss.alpha,
                base_temperature=loss.base_temperature,
                gather=False,
            )
        )

    def measure(self, epoch: int, module: nn.Module) -> dict[str, float]:
        found = {} if self._learned is None else {"temperature": float(self._learned().detach())}
        every = self._settings.watch.knn_every
        if not every or ((epoch + 1) % every and epoch + 1 != self.epochs):
            return found
        return {**found, "knn": self._knn(module)}

    def describe(self, noted: Mapping[str, Any]) -> str:
        if "knn" not in noted:
            return ""
        return f"{'training' if self._held_out is None else 'held-out'} kNN {noted['knn']:.1f} %"

    def unwrap(self, module: nn.Module) -> nn.Module:
        return module.net if isinstance(module, Trained) else module

    def keep(self, epoch: int, module: nn.Module) -> None:
        if epoch + 1 in self._settings.keep_epochs:
            self._keep_encoder(epoch + 1, module)

    def _choose_watched(self) -> tuple[Split, Split]:
        """Images to know and images to ask about, which the seed chooses; never test images."""
        count = self._settings.watch.knn_samples
        if self._held_out is not None:
            return self._some(self._train, count)[0], self._some(self._held_out, count)[0]
        known, asked = self._some(self._train, count, count)
        return known, asked

    def _some(self, data: Split, *counts: int) -> list[Split]:
        order = permute(len(data), seed=self.seed, epoch=0, stream=Stream.SPLIT, device=data.device)
        return [data.take(part) for part in order[: sum(counts)].chunk(len(counts))]

    def _knn(self, module: nn.Module) -> float:
        autocast = torch.autocast(self._train.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")
        features = []
        for data in self._watched:
            with evaluating(module), autocast:
                parts = [
                    module(batch.images.to(self.net.dtype), upto="backbone").features["backbone"].float()
                    for batch in data.plain_batches(batch_size=min(self.batch_size, 256), size=self._size)
                ]
            features.append(torch.cat(parts))
        known, asked = self._watched
        return knn.accuracy(features[1], asked.labels, features[0], known.labels)
