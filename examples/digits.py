"""Train a small SelfCon encoder on the handwritten digits, then a linear classifier on each exit.

python examples/digits.py [--epochs 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace

import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

import selfcon

BATCH = 128


def pretrain(net: selfcon.MultiExitNetwork, train: selfcon.data.Resident, *, epochs: int, seed: int) -> None:
    method = selfcon.get_method("selfcon")
    policy = replace(selfcon.data.get_policy("simple"), scale=(0.5, 1.0))  # a small piece of a digit is none
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * math.ceil(len(train) / BATCH))
    net.train()
    for epoch in range(epochs):
        losses = []
        for batch in train.batches(policy, batch_size=BATCH, seed=seed, epoch=epoch):
            loss = method.loss_from_output(net(batch.images), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        if epoch == 0 or (epoch + 1) % 5 == 0 or epoch + 1 == epochs:
            print(f"  epoch {epoch + 1:3d} of {epochs}   loss {sum(losses) / len(losses):.3f}", flush=True)


@torch.no_grad()
def embed(net: selfcon.MultiExitNetwork, data: selfcon.data.Resident) -> dict[str, Tensor]:
    """Features [N, D] by exit, of the frozen encoder."""
    net.eval()
    outputs = [net(batch.images).features for batch in data.plain_batches(batch_size=512)]
    return {name: torch.cat([features[name] for features in outputs]) for name in net.names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    start = time.perf_counter()

    digits = selfcon.data.load("digits")
    train = selfcon.data.make_resident(digits.train)
    test = selfcon.data.make_resident(digits.test, like=train)
    net = selfcon.create_model("resnet18", width=0.25, image_size=16, exits=[selfcon.Exit(after=2, structure="fc")])
    print(f"SelfCon, ResNet-18 of a quarter of the width, {len(train)} digits:")
    pretrain(net, train, epochs=args.epochs, seed=args.seed)

    features, test_features = embed(net, train), embed(net, test)
    logits = []
    print(f"Accuracy on {len(test)} others, by a linear classifier on the frozen features:")
    for name in net.names:
        probe = LogisticRegression(max_iter=2000).fit(features[name].numpy(), train.labels.numpy())
        logits.append(torch.from_numpy(probe.decision_function(test_features[name].numpy())))
        print(f"  {name:9s} {accuracy(logits[-1], test.labels):5.1f} %")
    print(f"  ensemble  {accuracy(torch.stack(logits).mean(0), test.labels):5.1f} %")
    print(f"{time.perf_counter() - start:.0f} s in all.")


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return 100 * float((logits.argmax(1) == labels).double().mean())


if __name__ == "__main__":
    main()
