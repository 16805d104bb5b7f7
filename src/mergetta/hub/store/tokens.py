"""Tokens and the dashboard's sessions: created once, kept as hashes."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Collection, Mapping, Sequence

import sqlalchemy as sa

from mergetta.errors import MergettaError
from mergetta.hub.records import ADMIN, PENDING, ROLES, TokenRecord
from mergetta.hub.store.audit import COMMAND_LINE, AuditStore
from mergetta.hub.store.schema import experts, sessions, tokens
from mergetta.hub.store.storage import NotThere, reachable, record

SESSION_SECONDS = 12 * 3600.0
"""How long a person stays logged in."""


class TokenStore(AuditStore):
    def create_token(
        self,
        name: str,
        role: str,
        rate: float = 0.0,
        max_upload: int = 0,
        expires: float | None = None,
        families: Sequence[str] | None = None,
        device: str | None = None,
        by: str = COMMAND_LINE,
        *,
        approved: bool = False,
        registers: str = "",
    ) -> tuple[str, TokenRecord]:
        """The token itself is returned once and stored nowhere; it has 256 random bits, so a plain hash is safe.

        It is good until `expires`, for `families` only, and its reports are those of `device`, where these are given.
        """
        if role not in ROLES:
            raise MergettaError(f"A role is {', '.join(ROLES)}, not {role!r}.")
        if role == ADMIN and families:
            raise MergettaError("An administrator sees all families: a token for some of them has another role.")
        if expires is not None and not expires < 1e11:
            raise MergettaError("A token ends at some time, or never: leave the time out.")
        secret = f"mgt_{secrets.token_urlsafe(32)}"
        now = time.time()
        entry = TokenRecord(
            secrets.token_hex(6), name, role, rate, max_upload, now, expires=expires,
            approved=now if approved or role == ADMIN else None, registers=registers,
            families=sorted(families) if families else None, device=device,
        )  # fmt: skip
        with reachable(), self.database.write() as connection:
            connection.execute(tokens.insert().values(**vars(entry), hash=hash_of(secret)))
            self._note(connection, by, "create token", entry.id, why=f"{name} ({role})")
        return secret, entry

    def revoke_token(self, token: str, by: str = COMMAND_LINE) -> None:
        mine = tokens.update().where(tokens.c.id == token)
        with reachable(), self.database.write() as connection:
            if not connection.execute(mine.values(revoked=time.time())).rowcount:
                raise NotThere(f"There is no token {token!r}: `mergetta hub token list` shows them.")
            self._note(connection, by, "revoke token", token)

    def approve_token(self, token: str, by: str = COMMAND_LINE) -> None:
        """Merge what it has uploaded and will upload, as far as the screening finds nothing odd."""
        waiting = sa.select(experts.c.family).where(experts.c.token == token, experts.c.state == PENDING).distinct()
        with reachable(), self.database.write() as connection:
            fresh = tokens.update().where(tokens.c.id == token, tokens.c.approved.is_(None))
            if connection.execute(fresh.values(approved=time.time())).rowcount:
                self._note(connection, by, "approve token", token)
                for family in sorted(connection.execute(waiting).scalars()):
                    self._change(connection, family)
            elif connection.execute(sa.select(tokens.c.id).where(tokens.c.id == token)).first() is None:
                raise NotThere(f"There is no token {token!r}: `mergetta hub token list` shows them.")

    def token_called(self, word: str) -> TokenRecord:
        """By its id, its name, or a beginning of either that no other token has. A name may outlive a revoked token."""
        known = self.tokens()
        alive = [token for token in known if token.revoked is None]
        found = (
            [token for token in known if token.id == word]
            or [token for token in alive if token.name == word]
            or [token for token in alive if word and (token.id.startswith(word) or token.name.startswith(word))]
        )
        if not found:
            raise NotThere(f"There is no token {word!r}: `mergetta hub token list` shows them.")
        if len(found) > 1:
            ids = ", ".join(token.id for token in found[:5])
            raise MergettaError(f"{len(found)} tokens are called {word!r} or begin so: give an id ({ids}).")
        return found[0]

    def unapproved(self) -> set[str]:
        """Tokens whose uploads wait."""
        query = sa.select(tokens.c.id).where(tokens.c.approved.is_(None))
        with reachable(), self.database.read() as connection:
            return set(connection.execute(query).scalars())

    def tokens(self) -> list[TokenRecord]:
        with reachable(), self.database.read() as connection:
            rows = connection.execute(sa.select(tokens).order_by(tokens.c.created)).all()
        return [record(TokenRecord, row) for row in rows]

    def token_names(self, ids: Collection[str]) -> dict[str, str]:
        query = sa.select(tokens.c.id, tokens.c.name).where(tokens.c.id.in_(ids))
        with reachable(), self.database.read() as connection:
            return {row.id: row.name for row in connection.execute(query).all()}

    def find_token(self, secret: str) -> TokenRecord | None:
        """None for an unknown or revoked one."""
        return self._valid_token(tokens.c.hash == hash_of(secret))

    def _valid_token(self, condition: sa.ColumnElement[bool]) -> TokenRecord | None:
        with reachable(), self.database.read() as connection:
            row = connection.execute(sa.select(tokens).where(condition, tokens.c.revoked.is_(None))).first()
        return None if row is None else record(TokenRecord, row)

    def count_revoked(self) -> int:
        """Changes with every revocation, whatever the clocks say."""
        query = sa.select(sa.func.count()).select_from(tokens).where(tokens.c.revoked.is_not(None))
        with reachable(), self.database.read() as connection:
            return int(connection.execute(query).scalar_one())

    def revoked(self) -> frozenset[str]:
        with reachable(), self.database.read() as connection:
            return frozenset(connection.execute(sa.select(tokens.c.id).where(tokens.c.revoked.is_not(None))).scalars())

    def note_use(self, used: Mapping[str, float]) -> None:
        """When tokens were last seen."""
        mine = tokens.update().where(tokens.c.id == sa.bindparam("token")).values(last_used=sa.bindparam("time"))
        with reachable(), self.database.write() as connection:
            connection.execute(mine, [{"token": token, "time": when} for token, when in used.items()])

    def open_session(self, token: str) -> str:
        """A secret for a cookie, which stands for the token for some hours and is worth nothing elsewhere."""
        secret, now = f"mgs_{secrets.token_urlsafe(32)}", time.time()
        with reachable(), self.database.write() as connection:
            connection.execute(sessions.delete().where(sessions.c.expires < now))
            row = {"hash": hash_of(secret), "token": token, "expires": now + SESSION_SECONDS}
            connection.execute(sessions.insert().values(row))
            self._note(connection, token, "log in", token)
        return secret

    def close_session(self, secret: str) -> None:
        with reachable(), self.database.write() as connection:
            connection.execute(sessions.delete().where(sessions.c.hash == hash_of(secret)))

    def find_session(self, secret: str) -> TokenRecord | None:
        """The token that it stands for; None if that, or the session, is over."""
        alive = sa.select(sessions.c.token).where(sessions.c.hash == hash_of(secret), sessions.c.expires > time.time())
        return self._valid_token(tokens.c.id.in_(alive))


def hash_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
