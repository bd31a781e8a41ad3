"""What a pretrained encoder is worth elsewhere: other data, other tasks, corrupted images.

`classify`, `segment`, `detect` and `corruption` work on run folders; the modules below do so on networks and tensors.
"""

from typing import TYPE_CHECKING

from selfcon._lazy import attach

if TYPE_CHECKING:
    from selfcon.workflows.scenes import detect as detect
    from selfcon.workflows.scenes import segment as segment
    from selfcon.workflows.transfer import classify as classify
    from selfcon.workflows.transfer import corruption as corruption

_NAMES = {
    "classify": "selfcon.workflows.transfer",
    "corruption": "selfcon.workflows.transfer",
    "detect": "selfcon.workflows.scenes",
    "segment": "selfcon.workflows.scenes",
}
__all__ = list(_NAMES)
__getattr__, __dir__ = attach(__name__, _NAMES)
