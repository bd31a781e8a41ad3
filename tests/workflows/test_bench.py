"""Which part of a step a kernel belongs to."""

from __future__ import annotations

import pytest

from selfcon.workflows.bench import _kind_of


def test_kernels_of_ours_are_known_by_their_names() -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux only")
    from selfcon.data import augment_triton
    from selfcon.losses import contrast_kernels, contrast_places

    assert _kind_of(augment_triton._augment.__name__) == "augmentation"
    for kernel in (
        contrast_places.pack,
        contrast_places.arrange,
        contrast_kernels.statistics,
        contrast_kernels.gradient,
    ):
        assert _kind_of(kernel.__name__) == "loss_kernels"
    assert _kind_of("batch_norm_collect_statistics_kernel") == "batch_norm"
