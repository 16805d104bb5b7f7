"""What all parts of the store stand on: a database, blobs, and one kind of error for everything that storage does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, TimeoutError

from mergetta.errors import MergettaError
from mergetta.hub.store.blobs import Blobs
from mergetta.hub.store.database import Database
from mergetta.hub.store.schema import families

R = TypeVar("R")


class NotThere(MergettaError):
    """There is no such family, expert, bundle or token."""


class Conflict(MergettaError):
    """It contradicts what is stored."""


class Refused(MergettaError):
    """This token may not do that, or not any more."""


class Damaged(MergettaError):
    """What is stored is not what was put: others are not affected, and trying again does not help."""


class Unavailable(MergettaError):
    """Database or blobs cannot be reached, or are full: nothing was changed, try again later."""


@contextmanager
def reachable() -> Iterator[None]:
    """Turn the many ways in which storage fails into one."""
    try:
        yield
    except IntegrityError:
        raise
    except DataError as error:
        raise MergettaError(f"The database cannot hold this: {first_line(error.orig or error)}.") from error
    except (DBAPIError, TimeoutError) as error:
        cause = getattr(error, "orig", None) or error
        raise Unavailable(f"The hub's database is not available: {first_line(cause)}.") from error
    except FileNotFoundError:
        raise
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.startswith(("botocore", "aiobotocore", "aiohttp")):
            raise Unavailable(f"The hub's blob store is not available: {first_line(error)}.") from error
        raise


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def repeated(action: Callable[[], None]) -> None:
    """Run a transaction, and again if another process inserted the same row in between: then it is an update."""
    try:
        action()
    except IntegrityError:
        action()


def record(kind: type[R], row: sa.Row[Any]) -> R:
    return kind(**{f.name: row._mapping[f.name] for f in fields(kind)})  # type: ignore[arg-type]


def unknown(family: str) -> NotThere:
    return NotThere(f"The hub does not know the family {family!r}: register it first.")


class Storage:
    """The two halves: rows and contents."""

    database: Database
    blobs: Blobs

    def put_blob(self, data: bytes, digest: str | None = None) -> str:
        with reachable():
            try:
                return self.blobs.put(data, digest)
            except (MergettaError, FileNotFoundError) as error:  # a file that cannot be written, a bucket not there
                raise Unavailable(f"The hub's blob store is not available: {error}") from error

    def blob(self, digest: str) -> bytes:
        with reachable():
            try:
                return self.blobs.get(digest)
            except FileNotFoundError:
                raise NotThere(f"There is no blob {digest}.") from None
            except ValueError as error:
                raise Damaged(f"The hub's blob store cannot be trusted: {error}.") from error

    def _change(self, connection: sa.Connection, family: str) -> int:
        """A new generation of the pool."""
        generation = self._generation(connection, family) + 1
        connection.execute(families.update().where(families.c.id == family).values(generation=generation))
        return generation

    def _generation(self, connection: sa.Connection, family: str) -> int:
        """Takes the family's row, so that changes come one after the other. Who writes rows of a token, of its family
        and of what belongs to that takes them in this order: two orders would be a deadlock.
        """
        query = sa.select(families.c.generation).where(families.c.id == family).with_for_update(key_share=True)
        generation = connection.execute(query).scalar()
        if generation is None:
            raise unknown(family)
        return int(generation)
