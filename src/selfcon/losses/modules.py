"""The losses as modules over [B, K, D]: drop-ins for the `SupConLoss` that most scripts of the field carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from selfcon.errors import UsageError
from selfcon.losses.methods import get_method
from selfcon.losses.objective import Gather, Memory, Tally, check_features, contrastive_loss
from selfcon.losses.temperature import LEAST, LearnedTemperature, check_number


class SelfConLoss(nn.Module):
    """Eq. 2 over K features of each sample, of whatever views and exits: each is contrasted with every other.

    Positives of a feature are all others of its label (-1 is a class like any other); with `labels=None` those of its
    sample, which is SimCLR for two views. There is no hidden scale: `base_temperature=0.07` gives that of SupContrast
    and of the paper's code. Features are normalised inside.

    With `learn_temperature` the temperature is where learning begins: its logarithm is a parameter of this module, for
    your optimiser (without weight decay), and `loss.temperature()` tells what it has become.
    """

    def __init__(
        self,
        temperature: float | Tensor = 0.1,
        *theirs: object,
        base_temperature: float | None = None,
        learn_temperature: bool = False,
        implementation: str = "auto",
        gather: Gather = None,
        process_group: ProcessGroup | None = None,
        contrast_mode: object = None,
    ) -> None:
        super().__init__()
        if theirs or contrast_mode is not None:  # SupContrast's are temperature, contrast_mode, base_temperature
            raise UsageError(
                f"Every feature is an anchor here, as with SupContrast's contrast_mode='all': leave that out and name "
                f"the rest, as in {type(self).__name__}(temperature=0.07, base_temperature=0.07)."
            )
        if not isinstance(temperature, Tensor):
            temperature = check_number("temperature", temperature, least=LEAST)
        self.temperature: float | Tensor | LearnedTemperature
        self.temperature = LearnedTemperature(float(temperature)) if learn_temperature else temperature
        self.base_temperature = base_temperature
        self.implementation = implementation
        self.gather = gather
        self.process_group = process_group

    def forward(
        self,
        features: Tensor,
        labels: Tensor | None = None,
        mask: object = None,
        *,
        tally: Tally | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """The loss of features [B, K, D] and labels [B], a scalar.

        `memory`, features [M, D] or [M, K, D] and their labels [M], is contrasted with, too, but they are no anchors
        and get no gradient. A `mask` is not taken.
        """
        if mask is not None:
            raise UsageError("A mask is not taken: labels=mask.argmax(1) says the same of one that is made of classes.")
        check_features(features, "BKD")
        if isinstance(labels, Tensor) and labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        temperature = self.temperature() if isinstance(self.temperature, LearnedTemperature) else self.temperature
        return contrastive_loss(
            features[:, None],
            labels,
            get_method("selfcon").terms,
            temperature=temperature,
            base_temperature=self.base_temperature,
            implementation=self.implementation,
            gather=self.gather,
            process_group=self.process_group,
            tally=tally,
            memory=memory,
        )

    if TYPE_CHECKING:  # nn.Module's own returns Any

        def __call__(
            self,
            features: Tensor,
            labels: Tensor | None = None,
            mask: object = None,
            *,
            tally: Tally | None = None,
            memory: Memory | None = None,
        ) -> Tensor: ...

    def extra_repr(self) -> str:
        told = "" if isinstance(self.temperature, nn.Module) else f"temperature={self.temperature}, "
        return f"{told}base_temperature={self.base_temperature}"


class SupConLoss(SelfConLoss):
    """Compute Eq. 1 over K views of each sample: the same sum as `SelfConLoss`.

    Differences from SupContrast's `SupConLoss`:

    - Anchors without a positive are left out of the mean. SupContrast counts them as zero, so with one view and small
      batches its loss and gradients are smaller.
    - Features are normalized here. SupContrast expects normalized features.
    - The default temperature is 0.1, not 0.07. The loss is not multiplied by temperature / 0.07, unless you pass
      `base_temperature=0.07`.
    - Every feature is an anchor (`contrast_mode="all"` there), and a `mask` is refused.

    Example:
        >>> loss = SupConLoss(temperature=0.1)
        >>> loss(torch.randn(16, 2, 128), torch.arange(16) % 4)  # features [B, K, D], labels [B]
        tensor(...)
    """
