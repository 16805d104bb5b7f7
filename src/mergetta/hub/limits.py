"""How often a token may ask, and which tokens are known, so that hardly a request asks the database."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from mergetta.hub.records import TokenRecord
from mergetta.hub.store.tokens import TokenStore

FOLLOWED_EVERY = 1.0
"""Seconds until a token that was revoked is refused."""
TRUSTED_FOR = 300.0
"""Seconds until a token is looked up again; readers go on for as long while the database is away."""
REMEMBERED = 100_000
NOTED_EVERY = 60.0
"""Seconds between two writes of when tokens were last used."""
USED_AGAIN = 600.0
"""A token's use is not noted again for so many seconds."""
MOST_HELD = 4
"""Uploads of the largest size that are under way, of all tokens together."""


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
    """Remembers tokens, which of them are revoked, and counts their requests, per process."""

    def __init__(self) -> None:
        self._known: dict[tuple[bool, str], tuple[float, TokenRecord]] = {}  # whether of a session, and the secret
        self._buckets: dict[str, Bucket] = {}
        self._revoked: frozenset[str] = frozenset()
        self._followed = self._noted = -TRUSTED_FOR
        self._held: Counter[str] = Counter()
        self._used: dict[str, float] = {}
        self._told: dict[str, float] = {}

    def remembered(self, secret: str, session: bool) -> TokenRecord | None:
        found = self._known.get((session, secret))
        seconds = FOLLOWED_EVERY if session else TRUSTED_FOR
        return found[1] if found and time.monotonic() - found[0] < seconds else None

    def remember(self, secret: str, token: TokenRecord, session: bool) -> None:
        if len(self._known) >= REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[session, secret] = time.monotonic(), token

    def forget_session(self, secret: str) -> None:
        self._known.pop((True, secret), None)

    def refuses(self, token: TokenRecord) -> bool:
        """Also one that was looked up just before it was revoked, and remembered just after."""
        return token.id in self._revoked or (token.expires is not None and token.expires < time.time())

    def must_follow(self) -> bool:
        """Whether it is time to ask what was revoked; only one request is told so."""
        now = time.monotonic()
        due = now - self._followed >= FOLLOWED_EVERY
        if due:
            self._followed = now
        return due

    def follow(self, store: TokenStore) -> None:
        """One small question for all tokens, instead of one for each; and tell when they were used."""
        if store.count_revoked() != len(self._revoked):
            self._revoked = store.revoked()
        if self._used and time.monotonic() - self._noted >= NOTED_EVERY:
            self._noted = time.monotonic()
            used, self._used = self._used, {}
            store.note_use(used)

    def hold(self, token: TokenRecord, size: int) -> None:
        """Bytes of a token's uploads that are under way, or (negative) are no more."""
        self._held[token.id] += size
        if not self._held[token.id]:
            del self._held[token.id]

    def holds_too_much(self, token: TokenRecord, limit: int, largest: int) -> bool:
        """Whether this token's uploads together exceed `limit`, or those of all tokens several of the largest."""
        return self._held[token.id] > limit or self._held.total() > MOST_HELD * largest

    def wait(self, token: TokenRecord) -> float:
        """Seconds that a token must wait before its next request; 0 if it may go on."""
        now = time.monotonic()
        if now - self._told.get(token.id, -USED_AGAIN) >= USED_AGAIN:
            self._told[token.id] = now
            self._used[token.id] = time.time()
        if token.rate <= 0:
            return 0.0
        bucket = self._buckets.setdefault(token.id, Bucket(burst(token.rate), now))
        return bucket.take(token.rate, now)
