"""Train a small SelfCon encoder on the handwritten digits, then a linear classifier on each exit.

python examples/digits.py [--epochs 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate

import selfcon


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images [N, 3, 16, 16] in [-1, 1] and labels: 1,437 to train with and 360 to test on."""
    digits = load_digits()
    grey = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    images = interpolate(grey, size=16, mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.tensor(digits.target)
    train, test = train_test_split(torch.arange(len(labels)), test_size=360, random_state=0, stratify=labels)
    return images[train], labels[train], images[test], labels[test]


def jitter(images: Tensor) -> Tensor:
    """Each image a little moved, turned and scaled: digits must not be flipped."""
    angle = (torch.rand(len(images)) - 0.5) * 0.5
    scale = 0.85 + 0.3 * torch.rand(len(images))
    shift = (torch.rand(2, len(images)) - 0.5) * 0.4
    cos, sin = angle.cos() * scale, angle.sin() * scale
    theta = torch.stack([cos, -sin, shift[0], sin, cos, shift[1]], dim=1).view(-1, 2, 3)
    grid = affine_grid(theta, list(images.shape), align_corners=False)
    return grid_sample(images, grid, padding_mode="border", align_corners=False)


def pretrain(net: selfcon.MultiExitNetwork, images: Tensor, labels: Tensor, *, epochs: int) -> None:
    method = selfcon.get_method("selfcon")
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    batches = math.ceil(len(images) / 128)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * batches)
    net.train()
    for epoch in range(1, epochs + 1):
        losses = []
        for index in torch.randperm(len(images)).split(128):
            loss = method.loss_from_output(net(jitter(images[index])), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        if epoch == 1 or epoch % 5 == 0 or epoch == epochs:
            print(f"  epoch {epoch:3d} of {epochs}   loss {sum(losses) / len(losses):.3f}", flush=True)


@torch.no_grad()
def embed(net: selfcon.MultiExitNetwork, images: Tensor) -> dict[str, Tensor]:
    """Features [N, D] by exit, of the frozen encoder."""
    net.eval()
    outputs = [net(batch).features for batch in images.split(512)]
    return {name: torch.cat([features[name] for features in outputs]) for name in net.names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    start = time.perf_counter()

    x_train, y_train, x_test, y_test = load()
    net = selfcon.create_model("resnet18", width=0.25, stem="small", exits=[selfcon.Exit(after=2, structure="fc")])
    print(f"SelfCon, ResNet-18 of a quarter of the width, {len(x_train)} digits:")
    pretrain(net, x_train, y_train, epochs=args.epochs)

    train, test = embed(net, x_train), embed(net, x_test)
    logits = []
    print(f"Accuracy on {len(x_test)} others, by a linear classifier on the frozen features:")
    for name in net.names:
        probe = LogisticRegression(max_iter=2000).fit(train[name].numpy(), y_train.numpy())
        logits.append(torch.from_numpy(probe.decision_function(test[name].numpy())))
        print(f"  {name:9s} {accuracy(logits[-1], y_test):5.1f} %")
    print(f"  ensemble  {accuracy(torch.stack(logits).mean(0), y_test):5.1f} %")
    print(f"{time.perf_counter() - start:.0f} s in all.")


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return 100 * float((logits.argmax(1) == labels).double().mean())


if __name__ == "__main__":
    main()
