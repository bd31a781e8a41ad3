"""From a name or a path to batches of augmented images, the same way each time."""

from typing import TYPE_CHECKING

from selfcon._lazy import attach

if TYPE_CHECKING:
    from selfcon.data import augment as augment
    from selfcon.data.audit import Audit as Audit
    from selfcon.data.audit import check as check
    from selfcon.data.contact_sheet import draw_contact_sheet as draw_contact_sheet
    from selfcon.data.packed import pack as pack
    from selfcon.data.policies import Policy as Policy
    from selfcon.data.policies import add_policy as add_policy
    from selfcon.data.policies import get_policy as get_policy
    from selfcon.data.resident import Resident as Resident
    from selfcon.data.resident import make_resident as make_resident
    from selfcon.data.shards import write_shards as write_shards
    from selfcon.data.source import ArrayImages as ArrayImages
    from selfcon.data.source import FileImages as FileImages
    from selfcon.data.source import Source as Source
    from selfcon.data.sources import add_source as add_source
    from selfcon.data.sources import list_sources as list_sources
    from selfcon.data.sources import load as load
    from selfcon.data.split import Batch as Batch

_NAMES = {
    "Audit": "selfcon.data.audit",
    "check": "selfcon.data.audit",
    "augment": "selfcon.data.augment",
    "draw_contact_sheet": "selfcon.data.contact_sheet",
    "pack": "selfcon.data.packed",
    "Policy": "selfcon.data.policies",
    "add_policy": "selfcon.data.policies",
    "get_policy": "selfcon.data.policies",
    "Batch": "selfcon.data.split",
    "Resident": "selfcon.data.resident",
    "make_resident": "selfcon.data.resident",
    "write_shards": "selfcon.data.shards",
    "ArrayImages": "selfcon.data.source",
    "FileImages": "selfcon.data.source",
    "Source": "selfcon.data.source",
    "add_source": "selfcon.data.sources",
    "list_sources": "selfcon.data.sources",
    "load": "selfcon.data.sources",
}
__all__ = list(_NAMES)
__getattr__, __dir__ = attach(__name__, _NAMES)
