"""Contrastive and one-stage losses: one objective over many sets."""

from typing import TYPE_CHECKING

from selfcon._lazy import attach

if TYPE_CHECKING:
    from selfcon.losses.methods import Method as Method
    from selfcon.losses.methods import add_method as add_method
    from selfcon.losses.methods import get_method as get_method
    from selfcon.losses.methods import list_methods as list_methods
    from selfcon.losses.modules import SelfConLoss as SelfConLoss
    from selfcon.losses.modules import SupConLoss as SupConLoss
    from selfcon.losses.objective import Tally as Tally
    from selfcon.losses.objective import contrastive_loss as contrastive_loss
    from selfcon.losses.objective import normalise as normalise
    from selfcon.losses.one_stage import OneStage as OneStage
    from selfcon.losses.sets import Term as Term

_NAMES = {
    "Method": "selfcon.losses.methods",
    "add_method": "selfcon.losses.methods",
    "get_method": "selfcon.losses.methods",
    "list_methods": "selfcon.losses.methods",
    "SelfConLoss": "selfcon.losses.modules",
    "SupConLoss": "selfcon.losses.modules",
    "Tally": "selfcon.losses.objective",
    "contrastive_loss": "selfcon.losses.objective",
    "normalise": "selfcon.losses.objective",
    "OneStage": "selfcon.losses.one_stage",
    "Term": "selfcon.losses.sets",
}
__all__ = list(_NAMES)
__getattr__, __dir__ = attach(__name__, _NAMES)
