"""Multi-exit networks on any timm backbone."""

from selfcon.networks.exits import BACKBONE, Exit
from selfcon.networks.multi_exit import MultiExitNetwork, Output
from selfcon.networks.registry import create_model, list_models

__all__ = ["BACKBONE", "Exit", "MultiExitNetwork", "Output", "create_model", "list_models"]
