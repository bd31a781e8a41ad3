"""How others do it, for comparison on the same machine: kornia's augmentation, and the manner of the released code.

That manner: PIL transforms in worker processes, channels first, float16 with a scaler, a loss with N x N matrices, and
a `.item()` in every step for the meters. Network and mathematics are ours.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from selfcon.config import Settings
from selfcon.data.source import Images
from selfcon.losses.methods import get_method
from selfcon.losses.parts import with_own_parts
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.progress import say


def augmentations(stored: Tensor, size: int) -> dict[str, Callable[[], Any]]:
    """Other implementations of the standard policy on images [B, 3, H, W], by name, as far as they are installed.

    All of them are given all images.
    """
    pipeline = _transform(size)
    pictures = [Image.fromarray(image.permute(1, 2, 0).cpu().numpy()) for image in stored]
    found: dict[str, Callable[[], Any]] = {
        "torchvision in one process": lambda: [pipeline(picture) for picture in pictures]
    }
    try:
        from kornia import augmentation as kornia
    except ImportError:
        say("bench: kornia is not installed, so it is not compared with")
        return found
    sequence = kornia.AugmentationSequential(
        kornia.RandomResizedCrop((size, size), scale=(0.2, 1.0)),
        kornia.RandomHorizontalFlip(),
        kornia.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        kornia.RandomGrayscale(p=0.2),
        kornia.Normalize((0.5,) * 3, (0.5,) * 3),
    )
    return found | {"kornia": lambda: sequence(stored.float() / 255)}


def train_as_released(
    net: MultiExitNetwork, images: Images, settings: Settings, *, device: torch.device, workers: int, steps: int
) -> tuple[float, float]:
    """Images a second of whole steps with their data, and of the network and loss alone."""
    method = with_own_parts(get_method(settings.method), device)
    batch_size = min(settings.batch_size, len(images))  # as ours: fewer images than a batch are one
    loader = DataLoader(
        _Pictures(images, _transform(settings.image_size or 32), method.views),
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        drop_last=True,
    )
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(device.type)
    total = 0.0

    def update(views: list[Tensor], labels: Tensor) -> None:
        nonlocal total
        pictures, there = torch.cat(views).to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.float16):
            loss = method.loss_from_output(net(pictures), there, base_temperature=0.07, implementation="dense")
        total += loss.item()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    net.train()
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=torch.backends.cudnn.allow_tf32):
        batches = itertools.chain.from_iterable(loader for _ in itertools.count())
        warm = steps // 2 + 1  # until what the workers made ahead is used up
        for views, labels in itertools.islice(batches, warm):
            update(views, labels)
        start = time.perf_counter()
        for views, labels in itertools.islice(batches, steps):
            update(views, labels)
        whole = steps * batch_size / (time.perf_counter() - start)
        views = [view.to(device) for view in views]
        labels = labels.to(device)
        start = time.perf_counter()
        for _ in range(steps):
            update(views, labels)
        bare = steps * batch_size / (time.perf_counter() - start)
    return whole, bare


def _transform(size: int) -> Callable[[Image.Image], Tensor]:
    jitter = transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8)
    steps = [
        transforms.RandomResizedCrop(size, scale=(0.2, 1.0)),
        transforms.RandomHorizontalFlip(),
        jitter,
        transforms.RandomGrayscale(p=0.2),
        transforms.ToTensor(),
        transforms.Normalize((0.5,) * 3, (0.5,) * 3),
    ]
    pipeline: Callable[[Image.Image], Tensor] = transforms.Compose(steps)
    return pipeline


class _Pictures(Dataset[tuple[list[Tensor], int]]):
    def __init__(self, images: Images, transform: Callable[[Image.Image], Tensor], views: int) -> None:
        self._images, self._transform, self._views = images, transform, views

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[list[Tensor], int]:
        picture = Image.fromarray(self._images[index])
        return [self._transform(picture) for _ in range(self._views)], int(self._images.labels[index])
