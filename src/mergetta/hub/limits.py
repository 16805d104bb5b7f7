"""How often a token may ask, and which tokens were seen a moment ago, so that not every request asks the database."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mergetta.hub.records import TokenRecord

TRUSTED_FOR = 1.0
"""Seconds until a token that was revoked is refused."""
TRUSTED_OFFLINE = 300.0
"""The same while the database is away: readers go on."""
REMEMBERED = 10_000


@dataclass
class Bucket:
    """Allows `rate` requests per second on average, twice as many at once."""

    left: float
    filled: float

    def take(self, rate: float, now: float) -> float:
        """0 if allowed, else seconds to wait."""
        self.left = min(burst(rate), self.left + (now - self.filled) * rate)
        self.filled = now
        if self.left >= 1:
            self.left -= 1
            return 0.0
        return (1 - self.left) / rate


def burst(rate: float) -> float:
    return max(1.0, 2 * rate)


class Gate:
    """Remembers tokens and counts their requests, per process."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, TokenRecord]] = {}
        self._buckets: dict[str, Bucket] = {}

    def remembered(self, secret: str, seconds: float = TRUSTED_FOR) -> TokenRecord | None:
        found = self._known.get(secret)
        return found[1] if found and time.monotonic() - found[0] < seconds else None

    def remember(self, secret: str, token: TokenRecord) -> None:
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[secret] = time.monotonic(), token

    def wait(self, token: TokenRecord) -> float:
        """Seconds that a token must wait before its next request; 0 if it may go on."""
        if token.rate <= 0:
            return 0.0
        now = time.monotonic()
        bucket = self._buckets.setdefault(token.id, Bucket(burst(token.rate), now))
        return bucket.take(token.rate, now)
