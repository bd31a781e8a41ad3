"""Why it works: what features know, what the loss bounds, where gradients go, what training costs.

Functions on tensors and networks; `selfcon.analyze` does the same on run folders, with pictures.
"""

from typing import TYPE_CHECKING

from selfcon._lazy import attach

if TYPE_CHECKING:
    from selfcon.analysis import bounds as bounds
    from selfcon.analysis import cost as cost
    from selfcon.analysis import embedding as embedding
    from selfcon.analysis import generalization as generalization
    from selfcon.analysis import gradcam as gradcam
    from selfcon.analysis import gradients as gradients
    from selfcon.analysis import information as information

_NAMES = {
    name: f"selfcon.analysis.{name}"
    for name in ("bounds", "cost", "embedding", "generalization", "gradcam", "gradients", "information")
}
__all__ = list(_NAMES)
__getattr__, __dir__ = attach(__name__, _NAMES)
