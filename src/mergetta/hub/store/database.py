"""Connections: SQLite (WAL) by default, PostgreSQL by URL; the same transactions on both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from mergetta.errors import MergettaError, how_to_install

POSTGRES: dict[str, Any] = {
    "pool_pre_ping": True,
    "pool_size": 20,
    "max_overflow": 20,  # together as many as there are worker threads
    "connect_args": {"connect_timeout": 5},
}
LOCK = 4_911_027  # any number: two hubs that start together migrate one after the other


class Database:
    def __init__(self, url: str) -> None:
        try:
            address = make_url(url)
            if address.drivername in ("postgres", "postgresql"):
                address = address.set(drivername="postgresql+psycopg")
            self.sqlite = address.get_backend_name() == "sqlite"
            if not self.sqlite and address.get_backend_name() != "postgresql":
                raise MergettaError(f"The hub keeps its data in SQLite or PostgreSQL, not in {address.drivername!r}.")
            if self.sqlite and address.database:
                Path(address.database).parent.mkdir(parents=True, exist_ok=True)
            self.engine = sqlite_engine(address) if self.sqlite else create_engine(address, **POSTGRES)
        except ArgumentError as error:
            raise MergettaError(f"{url!r} is not the address of a database: {error}.") from error
        except ModuleNotFoundError as error:
            raise MergettaError(f"{url!r} needs the package {error.name}: {how_to_install('postgres')}") from error
        except OSError as error:
            raise MergettaError(f"Cannot write {address.database}: {error.strerror or error}.") from error
        self._writing = threading.Lock()

    def migrate(self) -> None:
        """Bring the tables to the shape that this version needs; nothing to do if they are."""
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        with self.write() as connection:
            if not self.sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction. SQLite has one writer at a time: within the process they queue here, not in its busy loop."""
        if self.sqlite:
            with self._writing, self.engine.begin() as connection:
                yield connection
        else:
            with self.engine.begin() as connection:
                yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self.engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Reads that all see the same moment, while others write."""
        with self.engine.connect() as connection:
            if not self.sqlite:
                yield connection.execution_options(isolation_level="REPEATABLE READ")
                return
            connection = connection.execution_options(isolation_level="AUTOCOMMIT")
            connection.exec_driver_sql("BEGIN")
            try:
                yield connection
            finally:
                connection.exec_driver_sql("ROLLBACK")

    def close(self) -> None:
        self.engine.dispose()


def sqlite_engine(address: Any) -> Engine:
    engine = create_engine(address, connect_args={"check_same_thread": False, "timeout": 30})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions begin where we say so, below
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # a lock that is upgraded later can fail

    return engine
