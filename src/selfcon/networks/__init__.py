"""Multi-exit networks on any timm backbone."""

from typing import TYPE_CHECKING

from selfcon._lazy import attach

if TYPE_CHECKING:
    from selfcon.networks.exits import BACKBONE as BACKBONE
    from selfcon.networks.exits import Exit as Exit
    from selfcon.networks.multi_exit import MultiExitNetwork as MultiExitNetwork
    from selfcon.networks.multi_exit import Output as Output
    from selfcon.networks.registry import create_model as create_model
    from selfcon.networks.registry import list_models as list_models

_NAMES = {
    "BACKBONE": "selfcon.networks.exits",
    "Exit": "selfcon.networks.exits",
    "MultiExitNetwork": "selfcon.networks.multi_exit",
    "Output": "selfcon.networks.multi_exit",
    "create_model": "selfcon.networks.registry",
    "list_models": "selfcon.networks.registry",
}
__all__ = list(_NAMES)
__getattr__, __dir__ = attach(__name__, _NAMES)
