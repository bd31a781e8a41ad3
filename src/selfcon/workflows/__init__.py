"""What joins the parts: from settings to a finished run, and from a run to numbers about it."""

from selfcon.workflows.measures import evaluate, knn
from selfcon.workflows.pipeline import fit, pretrain, probe, train

__all__ = ["evaluate", "fit", "knn", "pretrain", "probe", "train"]
