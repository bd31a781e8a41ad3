"""The analyses on run folders, one function for each verb of `selfcon analyze`; NAME writes NAME.json, .svg and .png.

For networks that are no runs, the functions of `selfcon.analysis` do the same work on tensors.
"""

from selfcon.workflows.cost_analysis import cost
from selfcon.workflows.feature_analyses import PAIRS, embedding, generalization, information
from selfcon.workflows.loss_analyses import bounds, gradcam, gradients

__all__ = ["PAIRS", "bounds", "cost", "embedding", "generalization", "gradcam", "gradients", "information"]
