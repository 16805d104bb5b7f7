"""Tokens: created once, kept as hashes."""

from __future__ import annotations

import hashlib
import secrets
import time

import sqlalchemy as sa

from mergetta.errors import MergettaError
from mergetta.hub.records import ADMIN, PENDING, ROLES, TokenRecord
from mergetta.hub.schema import experts, tokens
from mergetta.hub.storage import NotThere, Storage, reachable, record


class TokenStore(Storage):
    def create_token(
        self,
        name: str,
        role: str,
        rate: float = 0.0,
        max_upload: int = 0,
        *,
        approved: bool = False,
        registers: str = "",
    ) -> tuple[str, TokenRecord]:
        """The token itself is returned once and stored nowhere; it has 256 random bits, so a plain hash is safe."""
        if role not in ROLES:
            raise MergettaError(f"A role is {', '.join(ROLES)}, not {role!r}.")
        secret = f"mgt_{secrets.token_urlsafe(32)}"
        now = time.time()
        since = now if approved or role == ADMIN else None
        entry = TokenRecord(secrets.token_hex(6), name, role, rate, max_upload, now, None, since, registers)
        with reachable(), self.database.write() as connection:
            connection.execute(tokens.insert().values(**vars(entry), hash=hash_of(secret)))
        return secret, entry

    def revoke_token(self, token: str) -> None:
        with reachable(), self.database.write() as connection:
            done = connection.execute(tokens.update().where(tokens.c.id == token).values(revoked=time.time()))
        if not done.rowcount:
            raise NotThere(f"There is no token {token!r}: `mergetta hub token list` shows them.")

    def approve_token(self, token: str) -> None:
        """Merge what it has uploaded and will upload, as far as the screening finds nothing odd."""
        waiting = sa.select(experts.c.family).where(experts.c.token == token, experts.c.state == PENDING).distinct()
        with reachable(), self.database.write() as connection:
            fresh = tokens.update().where(tokens.c.id == token, tokens.c.approved.is_(None))
            if connection.execute(fresh.values(approved=time.time())).rowcount:
                for family in list(connection.execute(waiting).scalars()):
                    self._change(connection, family)
            elif connection.execute(sa.select(tokens.c.id).where(tokens.c.id == token)).first() is None:
                raise NotThere(f"There is no token {token!r}: `mergetta hub token list` shows them.")

    def unapproved(self) -> set[str]:
        """Tokens whose uploads wait."""
        query = sa.select(tokens.c.id).where(tokens.c.approved.is_(None))
        with reachable(), self.database.read() as connection:
            return set(connection.execute(query).scalars())

    def tokens(self) -> list[TokenRecord]:
        with reachable(), self.database.read() as connection:
            rows = connection.execute(sa.select(tokens).order_by(tokens.c.created)).all()
        return [record(TokenRecord, row) for row in rows]

    def find_token(self, secret: str) -> TokenRecord | None:
        """None for an unknown or revoked one."""
        query = sa.select(tokens).where(tokens.c.hash == hash_of(secret), tokens.c.revoked.is_(None))
        with reachable(), self.database.read() as connection:
            row = connection.execute(query).first()
        return None if row is None else record(TokenRecord, row)


def hash_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
