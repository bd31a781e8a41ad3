"""The three sets that tell one contrastive loss from another: anchors, positives, negatives.

Every loss of the family is a weighted sum of terms, and each term is the same objective over its own sets:

    L_i = -1/|P_i| sum_{p in P_i} s_ip + log sum_{a in P_i + N_i} exp(s_ia),    s_ij = z_i.z_j / tau

and the term is the mean of L_i over its anchors that have a positive.

Two features belong to the same *group* when they share the label (or, without labels, the sample). P_i are the features
of i's group at the exits in `positives`, N_i those of other groups at the exits in `negatives`; i itself is in neither.
Views need no rule of their own: they are further features of the same group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from selfcon.errors import unknown_name

if TYPE_CHECKING:
    from torch import Tensor

Exits = Literal["F", "G", "F+G"]
"""In the paper's letters: F the backbone (exit 0), G every sub-network (exits 1, 2, ...), F+G all of them."""

_SHARES = ("whole", "rest", "alpha")


@dataclass(frozen=True)
class Term:
    """One objective over its sets, and its share of the loss.

    The share `whole` is 1, `rest` is 1 / (1 + alpha) and `alpha` is alpha / (1 + alpha), where alpha is the setting
    `loss.alpha`: with two terms, one `rest` and one `alpha`, it says how much the second one counts.
    """

    anchors: Exits
    positives: Exits
    negatives: Exits
    share: Literal["whole", "rest", "alpha"] = "whole"

    def __post_init__(self) -> None:
        for name in ("anchors", "positives", "negatives"):
            given = getattr(self, name)
            if given == "G+F":
                object.__setattr__(self, name, "F+G")
            elif given not in get_args(Exits):
                raise unknown_name(f"set of {name}", given, get_args(Exits))
        if self.share not in _SHARES:
            raise unknown_name("share of a term", self.share, _SHARES)

    def weight(self, alpha: float) -> float:
        """The factor of this term: 1, 1/(1+alpha) or alpha/(1+alpha)."""
        return {"whole": 1.0, "rest": 1 / (1 + alpha), "alpha": alpha / (1 + alpha)}[self.share]


@dataclass(frozen=True)
class Contrast:
    """All features that are contrasted, of every process, and which rows of them are the anchors of this one."""

    features: Tensor  # [N, D], of unit length or zero
    groups: Tensor  # [N], what makes two features positives of each other
    exits: Tensor  # [N], 0 is the backbone
    own: slice  # rows whose anchors are computed here


def belongs(exits: Tensor, members: Exits) -> Tensor:
    """Where an exit is one of `members`: bool, shaped as `exits`, made on its device without a copy from the host."""
    if members == "F":
        return exits == 0
    if members == "G":
        return exits > 0
    return exits >= 0
