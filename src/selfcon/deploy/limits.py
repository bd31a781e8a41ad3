"""What clients of a service may ask for."""

from __future__ import annotations

import time
from dataclasses import dataclass

_MOST_CLIENTS = 10_000


@dataclass(frozen=True)
class Limits:
    """What one request, and one client, may ask for."""

    bytes: int = 20_000_000
    pixels: int = 50_000_000
    images: int = 64
    seconds: float = 15.0  # to send a request
    rate: float = 200.0  # requests a second of one client, on average
    waiting: int = 512  # images that wait for their answer


class Rates:
    """So many requests a second of each client, and twice as many at once."""

    def __init__(self, rate: float) -> None:
        self.rate, self._left = rate, dict[str, tuple[float, float]]()

    def allows(self, client: str) -> bool:
        now = time.monotonic()
        left, before = self._left.get(client, (2 * self.rate, now))
        left = min(2 * self.rate, left + self.rate * (now - before))
        if len(self._left) > _MOST_CLIENTS:  # those that were not heard of for long have all of theirs again
            self._left.clear()
        self._left[client] = (max(0.0, left - 1), now)
        return left >= 1
