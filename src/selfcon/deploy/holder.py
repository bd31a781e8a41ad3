"""The model that a service answers with."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

from selfcon.deploy.predictor import Predictor, load
from selfcon.errors import SelfconError, UsageError, is_shortage
from selfcon.progress import say

_FILES = ("model.json", "model.safetensors", "calibration.json")
_TRY_AGAIN = 60.0  # seconds, after a failure that may pass


class Holder:
    """The model of a run folder, loaded anew when its files change."""

    def __init__(self, folder: Path, device: Any) -> None:
        self.folder, self.device = folder, device
        self.state = self._look()
        self.model: Predictor = self._load()
        self.since = time.time()
        self.is_newest = True  # what is held, of what the folder holds
        self._again = math.inf  # when to try it again

    def _load(self) -> Predictor:
        model = load(self.folder, self.device)
        if not model.net.classifiers:
            raise UsageError(f"{self.folder} has no classifiers yet: `selfcon probe` trains them.")
        return model

    def _look(self) -> tuple[tuple[int, int], ...]:
        found = []
        for name in _FILES:
            with contextlib.suppress(OSError):
                status = (self.folder / name).stat()
                found.append((status.st_mtime_ns, status.st_size))
        return tuple(found)

    def refresh(self) -> bool:
        """Take what is new, once it is whole; what cannot be loaded changes nothing.

        Where memory or the disk did not suffice, which may pass, it is tried again later.
        """
        now = self._look()
        changed = now != self.state
        if not changed and time.monotonic() < self._again:
            return False
        self.state, self.is_newest, self._again = now, False, math.inf
        try:
            self.model = self._load()
        except Exception as error:  # whatever it is, the service goes on
            if isinstance(error, MemoryError | OSError) or is_shortage(error):
                self._again = time.monotonic() + _TRY_AGAIN
            why = error if isinstance(error, SelfconError) else repr(error)
            if changed:
                say(f"{self.folder} has changed and cannot be loaded, so the old model stays: {why}")
            return False
        self.since, self.is_newest = time.time(), True
        say(f"{self.folder} has changed: the new model answers from now on")
        return True
