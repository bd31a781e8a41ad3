"""The objective with its N x N matrix written out: the reference that every faster implementation must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfcon.losses.sets import Contrast, Term, belongs


def term_sums(contrast: Contrast, terms: Sequence[Term], temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """For each term the sum of L_i over the valid anchors among `contrast.own`, [T], and their number, [T].

    n anchors of this process, N features of all, D their dimension, T terms.
    """
    z_ND, groups_N, exits_N, own = contrast.features, contrast.groups, contrast.exits, contrast.own
    s_nN = z_ND[own] @ z_ND.T / temperature
    rows_n = torch.arange(len(z_ND), device=z_ND.device)[own]
    itself_nN = rows_n[:, None] == torch.arange(len(z_ND), device=z_ND.device)
    same_nN = groups_N[own][:, None] == groups_N

    sums, counts = [], []
    for term in terms:
        anchor_n = belongs(exits_N[own], term.anchors)
        positive_nN = same_nN & belongs(exits_N, term.positives) & ~itself_nN
        negative_nN = ~same_nN & belongs(exits_N, term.negatives)
        positives_n = positive_nN.sum(1)
        valid_n = anchor_n & (positives_n > 0)

        mean_positive_n = torch.where(positive_nN, s_nN, 0).sum(1) / positives_n.clamp(min=1)
        # A row without positives may be empty, and the gradient of logsumexp over nothing is NaN: let it see itself.
        denominator_nN = positive_nN | negative_nN | (itself_nN & ~valid_n[:, None])
        log_denominator_n = s_nN.masked_fill(~denominator_nN, -torch.inf).logsumexp(1)
        sums.append(torch.where(valid_n, log_denominator_n - mean_positive_n, 0).sum())
        counts.append(valid_n.sum())
    return torch.stack(sums), torch.stack(counts)
