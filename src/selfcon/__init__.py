"""Supervised contrastive learning of images from a single view.

`selfcon.get_method("selfcon").loss(...)` or `selfcon.SelfConLoss()` for the losses, `selfcon.create_model(...)` for
multi-exit networks on any timm backbone.
"""

from typing import TYPE_CHECKING

from selfcon._lazy import attach

if TYPE_CHECKING:
    from selfcon import analysis as analysis
    from selfcon import data as data
    from selfcon import errors as errors
    from selfcon import losses as losses
    from selfcon import networks as networks
    from selfcon import transfer as transfer
    from selfcon.losses.methods import Method as Method
    from selfcon.losses.methods import add_method as add_method
    from selfcon.losses.methods import get_method as get_method
    from selfcon.losses.methods import list_methods as list_methods
    from selfcon.losses.modules import SelfConLoss as SelfConLoss
    from selfcon.losses.modules import SupConLoss as SupConLoss
    from selfcon.networks.exits import Exit as Exit
    from selfcon.networks.multi_exit import MultiExitNetwork as MultiExitNetwork
    from selfcon.networks.multi_exit import Output as Output
    from selfcon.networks.registry import create_model as create_model
    from selfcon.networks.registry import list_models as list_models
    from selfcon.workflows import analyze as analyze
    from selfcon.workflows.calibrating import calibrate as calibrate
    from selfcon.workflows.exporting import export as export
    from selfcon.workflows.inference import embed as embed
    from selfcon.workflows.inference import load as load
    from selfcon.workflows.inference import predict as predict
    from selfcon.workflows.measures import evaluate as evaluate
    from selfcon.workflows.measures import knn as knn
    from selfcon.workflows.pipeline import fit as fit
    from selfcon.workflows.pipeline import pretrain as pretrain
    from selfcon.workflows.pipeline import train as train
    from selfcon.workflows.probing import probe as probe
    from selfcon.workflows.reporting import write_report as write_report
    from selfcon.workflows.trained import open_run as open_run

__version__ = "0.1.0"

_NAMES = {
    "analysis": "selfcon.analysis",
    "data": "selfcon.data",
    "errors": "selfcon.errors",
    "losses": "selfcon.losses",
    "networks": "selfcon.networks",
    "transfer": "selfcon.transfer",
    "Method": "selfcon.losses.methods",
    "add_method": "selfcon.losses.methods",
    "get_method": "selfcon.losses.methods",
    "list_methods": "selfcon.losses.methods",
    "SelfConLoss": "selfcon.losses.modules",
    "SupConLoss": "selfcon.losses.modules",
    "Exit": "selfcon.networks.exits",
    "MultiExitNetwork": "selfcon.networks.multi_exit",
    "Output": "selfcon.networks.multi_exit",
    "create_model": "selfcon.networks.registry",
    "list_models": "selfcon.networks.registry",
    "analyze": "selfcon.workflows.analyze",
    "calibrate": "selfcon.workflows.calibrating",
    "export": "selfcon.workflows.exporting",
    "embed": "selfcon.workflows.inference",
    "load": "selfcon.workflows.inference",
    "predict": "selfcon.workflows.inference",
    "evaluate": "selfcon.workflows.measures",
    "knn": "selfcon.workflows.measures",
    "fit": "selfcon.workflows.pipeline",
    "pretrain": "selfcon.workflows.pipeline",
    "probe": "selfcon.workflows.probing",
    "train": "selfcon.workflows.pipeline",
    "write_report": "selfcon.workflows.reporting",
    "open_run": "selfcon.workflows.trained",
}
__all__ = list(_NAMES)
__getattr__, __dir__ = attach(__name__, _NAMES)
