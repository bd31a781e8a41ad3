"""Wide residual networks (Zagoruyko and Komodakis, 2016), which timm lacks, with the methods of a timm network."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import dropout


class PreActivationBlock(nn.Module):
    """Normalisation, activation, 3x3 convolution, twice; the shortcut is projected where the shape changes."""

    def __init__(self, width_in: int, width: int, *, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        changes = stride != 1 or width_in != width
        self.shortcut = nn.Conv2d(width_in, width, 1, stride=stride, bias=False) if changes else None
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        active = self.bn1(x).relu()
        y = self.bn2(self.conv1(active)).relu()
        y = self.conv2(dropout(y, self.dropout, self.training))
        out: Tensor = y + (x if self.shortcut is None else self.shortcut(active))
        return out


class WideResNet(nn.Module):
    """Three groups of pre-activation blocks: images [B, 3, H, W] to features [B, widths[-1]].

    `dropout` is that between the convolutions of a block.
    """

    def __init__(
        self,
        *,
        depths: tuple[int, int, int],
        widths: tuple[int, int, int],
        stem_width: int = 16,
        dropout: float = 0.0,
        in_chans: int = 3,
    ) -> None:
        super().__init__()
        self.in_chans = in_chans
        self.widths = list(widths)
        self.num_features = self.head_hidden_size = widths[-1]
        self.conv1 = nn.Conv2d(in_chans, stem_width, 7, stride=2, padding=3, bias=False)
        self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        self.group1 = _group(stem_width, widths[0], depth=depths[0], stride=1, dropout=dropout)
        self.group2 = _group(widths[0], widths[1], depth=depths[1], stride=2, dropout=dropout)
        self.group3 = _group(widths[1], widths[2], depth=depths[2], stride=2, dropout=dropout)
        self.norm = nn.Sequential(nn.BatchNorm2d(widths[2]), nn.ReLU())
        self.global_pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward_features(self, x: Tensor) -> Tensor:
        """The last map [B, C, H, W], before pooling."""
        x = self.maxpool(self.conv1(x))
        out: Tensor = self.norm(self.group3(self.group2(self.group1(x))))
        return out

    def forward_head(self, x: Tensor, pre_logits: bool = True) -> Tensor:
        """Pooled features; there is no classifier here."""
        out: Tensor = self.global_pool(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _group(width_in: int, width: int, *, depth: int, stride: int, dropout: float) -> nn.Sequential:
    blocks = [PreActivationBlock(width_in, width, stride=stride, dropout=dropout)]
    blocks += [PreActivationBlock(width, width, stride=1, dropout=dropout) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)
