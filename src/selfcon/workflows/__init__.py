"""What joins the parts: from settings to a finished run, and from a run to numbers about it."""

from typing import TYPE_CHECKING

from selfcon._lazy import attach

if TYPE_CHECKING:
    from selfcon.workflows.measures import evaluate as evaluate
    from selfcon.workflows.measures import knn as knn
    from selfcon.workflows.pipeline import fit as fit
    from selfcon.workflows.pipeline import pretrain as pretrain
    from selfcon.workflows.pipeline import train as train
    from selfcon.workflows.probing import probe as probe

_NAMES = {
    "evaluate": "selfcon.workflows.measures",
    "knn": "selfcon.workflows.measures",
    "fit": "selfcon.workflows.pipeline",
    "pretrain": "selfcon.workflows.pipeline",
    "probe": "selfcon.workflows.probing",
    "train": "selfcon.workflows.pipeline",
}
__all__ = list(_NAMES)
__getattr__, __dir__ = attach(__name__, _NAMES)
