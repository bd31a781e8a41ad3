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
        now, most = time.monotonic(), max(1.0, 2 * self.rate)
        left, before = self._left.get(client, (most, now))
        left = min(most, left + self.rate * (now - before))
        allowed = left >= 1
        if len(self._left) > _MOST_CLIENTS:  # who was not heard of for long has all of theirs again
            self._left = {name: each for name, each in self._left.items() if self.rate * (now - each[1]) < most}
            if len(self._left) > _MOST_CLIENTS:
                self._left.clear()
        self._left[client] = (left - 1 if allowed else left, now)  # who is refused goes on saving
        return allowed
