"""What features look like."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from selfcon.analysis.embedding import describe, find_nearest, find_principal_plane, project
from selfcon.errors import DataError, UsageError


def test_numbers_equal_the_definitions_pair_by_pair() -> None:
    torch.manual_seed(0)
    features, labels = torch.randn(30, 5).double(), torch.arange(30) % 4
    z = normalize(features, dim=1)
    square = torch.cdist(z, z) ** 2
    off = ~torch.eye(30, dtype=torch.bool)
    found = describe(features, labels)
    sizes = torch.bincount(labels)
    means = [square[(labels == c)][:, labels == c].sum() / (sizes[c] * (sizes[c] - 1)) for c in range(4)]
    alignment = sum(mean * size for mean, size in zip(means, sizes, strict=True)) / 30
    assert found["alignment"] == pytest.approx(float(alignment))
    assert found["uniformity"] == pytest.approx(float((-2 * square[off]).exp().mean().log()), rel=1e-6)
    within = torch.stack([(1 - z[labels == c] @ z[labels == c].T).mean() for c in range(4)]).mean()
    every = [(1 - z[labels == c] @ z[labels == d].T).mean() for c in range(4) for d in range(4)]
    total = torch.stack(every).mean()
    assert found["class_separation"] == pytest.approx(float(1 - within / total))


def test_collapsed_classes_are_perfectly_separated() -> None:
    features = torch.eye(3).repeat(4, 1)
    found = describe(features, torch.arange(3).repeat(4))
    assert found["alignment"] == pytest.approx(0.0, abs=1e-9)
    assert found["class_separation"] == pytest.approx(1.0)


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:Tensorflow not installed:ImportWarning")  # of umap
@pytest.mark.parametrize("by", ["tsne", pytest.param("umap", marks=pytest.mark.slow)])
def test_maps_keep_far_groups_apart(by: str) -> None:
    torch.manual_seed(0)
    features = torch.cat([torch.randn(40, 8) * 0.1 + 3 * torch.eye(8)[group] for group in range(2)])
    threads = torch.get_num_threads()
    plane = project(features, by=by)
    assert torch.get_num_threads() == threads
    assert plane.shape == (80, 2)
    distances = torch.cdist(plane, plane)
    assert float(distances[:40, :40].mean()) < float(distances[:40, 40:].mean())


def test_the_principal_plane_is_that_of_scikit_learn() -> None:
    from sklearn.decomposition import PCA

    torch.manual_seed(0)
    features = torch.randn(60, 12) * torch.linspace(0.5, 3, 12)
    plane = find_principal_plane(features)
    expected = torch.from_numpy(PCA(2).fit_transform(normalize(features.double(), dim=1).numpy())).float()
    torch.testing.assert_close(plane, expected * (plane[0] * expected[0]).sign(), atol=1e-5, rtol=1e-4)
    farthest = plane.gather(0, plane.abs().argmax(0, keepdim=True))
    assert (farthest > 0).all()
    assert torch.equal(find_principal_plane(features), plane)


def test_nearest() -> None:
    rows, cosines = find_nearest(torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 1.0], [2.0, 0.1], [1.0, 1.0]]), count=2)
    assert rows.tolist() == [1, 2]
    assert cosines.tolist() == pytest.approx([0.99875, 0.70711], abs=1e-4)


def test_bad_input() -> None:
    with pytest.raises(DataError, match="one class"):
        describe(torch.randn(5, 2), torch.zeros(5, dtype=torch.long))
    with pytest.raises(DataError, match="No two"):
        describe(torch.randn(5, 2), torch.arange(5))
    with pytest.raises(DataError, match="one point"):
        project(torch.ones(50, 16))
    with pytest.raises(DataError, match="too few for a map"):
        project(torch.randn(5, 2))
    with pytest.raises(UsageError, match="tsne or umap"):
        project(torch.randn(50, 2), by="pca")
