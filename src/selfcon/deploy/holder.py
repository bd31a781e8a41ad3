"""The model that a service answers with."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from selfcon.deploy.predictor import Predictor, load
from selfcon.errors import SelfconError
from selfcon.progress import say

_FILES = ("model.json", "model.safetensors", "calibration.json")


class Holder:
    """The model of a run folder, loaded anew when its files change."""

    def __init__(self, folder: Path, device: Any) -> None:
        self.folder, self.device = folder, device
        self.state = self._look()
        self.model: Predictor = load(folder, device)
        self.since = time.time()

    def _look(self) -> tuple[tuple[int, int], ...]:
        found = []
        for name in _FILES:
            with contextlib.suppress(OSError):
                status = (self.folder / name).stat()
                found.append((status.st_mtime_ns, status.st_size))
        return tuple(found)

    def refresh(self) -> bool:
        """Take what is new, once it is whole; what cannot be loaded changes nothing."""
        now = self._look()
        if now == self.state:
            return False
        self.state = now
        try:
            self.model = load(self.folder, self.device)
        except Exception as error:  # whatever it is, the service goes on
            why = error if isinstance(error, SelfconError) else repr(error)
            say(f"{self.folder} has changed and cannot be loaded, so the old model stays: {why}")
            return False
        self.since = time.time()
        say(f"{self.folder} has changed: the new model answers from now on")
        return True
