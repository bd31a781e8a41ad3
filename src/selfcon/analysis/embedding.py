"""What features look like: their maps on a plane, how close classes lie together, who is near whom."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from selfcon.errors import DataError, UsageError

_ROWS = 1024
MAPS = ("tsne", "umap")
FEWEST_MAPPED = 10


def describe(features: Tensor, labels: Tensor) -> dict[str, float]:
    """Alignment, uniformity and class separation of features [N, D] on the sphere.

    Alignment is the mean squared distance of two features of a class (0: each class one point); uniformity the log of
    the mean of exp(-2 distance²) of any two (both by Wang and Isola); class separation 1 - the ratio of the mean cosine
    distance within classes to that of any two (Kornblith and others).
    """
    z = normalize(features.double(), dim=1)
    classes, labels = labels.to(z.device).unique(return_inverse=True)
    if len(classes) < 2:
        raise DataError("All these images are of one class, so nothing can be said of how classes lie.")
    counts = torch.bincount(labels).double()
    if int(counts.max()) < 2:
        raise DataError("No two of these images are of one class, so nothing can be said of how classes lie.")
    # |a - b|² = 2 - 2 a·b, so sums over pairs follow from the sums of classes.
    sums = torch.zeros(len(classes), z.shape[1], dtype=z.dtype, device=z.device).index_add_(0, labels, z)
    several = counts > 1
    cosine_of_class = ((sums * sums).sum(1) - counts)[several] / (counts * (counts - 1))[several]
    weights = counts[several] / counts[several].sum()
    alignment = float(2 - 2 * (weights * cosine_of_class).sum())
    means = sums / counts[:, None]  # classes count alike, whatever their size
    within = float(1 - (means * means).sum(1).mean())
    total = float(1 - (means.mean(0) ** 2).sum())
    repulsion = sum(float((4 * (rows @ z.T) - 4).exp().sum()) for rows in z.split(_ROWS)) - len(z)
    uniformity = float(torch.tensor(repulsion / (len(z) * (len(z) - 1))).log())
    return {"alignment": alignment, "uniformity": uniformity, "class_separation": 1 - within / max(total, 1e-12)}


def is_one_point(features: Tensor) -> bool:
    """Whether features [N, D] are all the same (or not finite), of which t-SNE makes the whole process crash."""
    return not float(features.std(0).max()) > 1e-6 * float(features.abs().max())  # not a number, too


def project(features: Tensor, *, by: str = "tsne", seed: int = 0) -> Tensor:
    """Features [N, D] on a plane [N, 2]."""
    if by not in MAPS:
        raise UsageError(f"A map is made by {' or '.join(MAPS)}, not {by!r}.")
    if len(features) < FEWEST_MAPPED:
        raise DataError(f"{len(features)} images are too few for a map: {FEWEST_MAPPED} is the least.")
    unit = normalize(features.float(), dim=1).cpu()
    if is_one_point(unit):
        raise DataError("All features are one point (or not finite), so there is nothing to map.")
    rows = unit.numpy()
    if by == "umap":
        threads = torch.get_num_threads()
        mapper = _umap().UMAP(metric="cosine", n_neighbors=min(15, len(rows) - 1), random_state=seed, n_jobs=1)
        plane = mapper.fit_transform(rows)
        torch.set_num_threads(threads)  # which numba changes for the whole process
    else:
        from sklearn.manifold import TSNE

        plane = TSNE(perplexity=min(30.0, (len(rows) - 1) / 3), init="pca", random_state=seed).fit_transform(rows)
    return torch.as_tensor(plane).float()


def find_principal_plane(features: Tensor) -> Tensor:
    """Return features [N, D] on the plane [N, 2] of their two principal components (PCA), with a fixed sign."""
    unit = normalize(features.double(), dim=1).cpu()
    centered = unit - unit.mean(0)
    values, vectors = torch.linalg.eigh(centered @ centered.T)  # ascending
    plane: Tensor = (vectors[:, -2:] * values[-2:].clamp(min=0).sqrt()).flip(1)
    farthest = plane.gather(0, plane.abs().argmax(0, keepdim=True))  # lies on the positive side
    return (plane * farthest.sign()).float()


def find_nearest(feature: Tensor, known: Tensor, *, count: int = 5) -> tuple[Tensor, Tensor]:
    """The rows of `known` [N, D] nearest to a feature [D], and their cosines."""
    if count < 1:
        raise UsageError(f"At least 1 neighbour must be asked for, not {count}.")
    cosines, rows = (normalize(known.float(), dim=1) @ normalize(feature.float(), dim=0)).topk(min(count, len(known)))
    return rows, cosines


def _umap() -> Any:
    try:
        import umap  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        raise UsageError(
            "UMAP is not installed: pip install '.[analysis]' in selfcon's folder, or take --map tsne."
        ) from None
    return umap
