"""The losses as modules over [B, K, D]: drop-ins for the `SupConLoss` that most scripts of the field carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from selfcon.losses.methods import get_method
from selfcon.losses.objective import Tally, check_features, contrastive_loss


class SelfConLoss(nn.Module):
    """Eq. 2 over K features of each sample, of whatever views and exits: each is contrasted with every other.

    Positives of a feature are all others of its label; with `labels=None` those of its sample, which is SimCLR for two
    views. There is no hidden scale: `base_temperature=0.07` gives that of SupContrast and of the paper's code. Features
    are normalised inside.
    """

    def __init__(
        self,
        temperature: float = 0.1,
        *,
        base_temperature: float | None = None,
        implementation: str = "auto",
        gather: bool | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.base_temperature = base_temperature
        self.implementation = implementation
        self.gather = gather
        self.process_group = process_group

    def forward(self, features: Tensor, labels: Tensor | None = None, *, tally: Tally | None = None) -> Tensor:
        """The loss of features [B, K, D] and labels [B], a scalar."""
        check_features(features, "BKD")
        if labels is not None and labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        return contrastive_loss(
            features[:, None],
            labels,
            get_method("selfcon").terms,
            temperature=self.temperature,
            base_temperature=self.base_temperature,
            implementation=self.implementation,
            gather=self.gather,
            process_group=self.process_group,
            tally=tally,
        )

    if TYPE_CHECKING:  # nn.Module's own returns Any

        def __call__(self, features: Tensor, labels: Tensor | None = None, *, tally: Tally | None = None) -> Tensor: ...

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, base_temperature={self.base_temperature}"


class SupConLoss(SelfConLoss):
    """Eq. 1 over K views of each sample: the sum of `SelfConLoss`, over features that come from elsewhere.

    Where SupContrast's differs: there features must be normalised before, the temperature is 0.07 unless told, the loss
    is multiplied by temperature / 0.07, and a `mask` may take the place of labels. Here every feature is an anchor
    (`contrast_mode="all"` there).
    """
