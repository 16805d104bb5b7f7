"""How uvicorn serves the hub: with limits on what a stranger can hold (connections, headers, queued requests, time)."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_CONNECTIONS = 1000
SPARE_FILES = 100
"""Of the files that a process may open, those that are not for connections: database, blobs, threads."""
LONGEST_HEAD = 32 * 2**10
"""Bytes of request line and headers; what has arrived at once may be a little more."""
MOST_QUEUED = 16
"""Requests that a client may send on one connection without waiting for answers."""
HEAD_SECONDS = 10.0
"""For a request line and all headers, from the connection or the last answer on."""
REQUEST_SECONDS = 900.0
"""For anything else: a connection never lasts for ever."""


def most_connections() -> int:
    """As many as the process has files for, after it has taken as many files as it needs and may have."""
    try:
        import resource
    except ImportError:  # not on Windows
        return MOST_CONNECTIONS
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + SPARE_FILES
    if 0 <= files < wanted:  # negative: no limit
        files = wanted if most < 0 else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    return MOST_CONNECTIONS if files < 0 else max(1, min(MOST_CONNECTIONS, files - SPARE_FILES))


class GuardedProtocol(HttpToolsProtocol):
    """One connection. uvicorn's own `limit_concurrency` refuses everybody once idle connections are many; here who has
    been silent longest makes room, so that a flood of half-open connections pushes out itself."""

    most: int | None = None
    """Connections of this process; found at the first of them."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unread = self._unsent = 0
        self._timer: asyncio.TimerHandle | None = None
        self._silent = True
        self._allow(HEAD_SECONDS)
        if GuardedProtocol.most is None:
            GuardedProtocol.most = most_connections()
        if len(self.connections) > GuardedProtocol.most:
            silent = [each for each in self.connections if isinstance(each, GuardedProtocol) and each._silent]
            min(silent, key=lambda each: each._began, default=self).drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self._unread > LONGEST_HEAD and not self.transport.is_closing():
            self.send_400_response("The headers are too long.")

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MOST_QUEUED:
            raise httptools.HttpParserError("too many requests at once")  # uvicorn answers 400 and closes
        self._unread, self._silent = 0, False
        self._allow(REQUEST_SECONDS)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread -= len(body)
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        self._unread = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # and no other one is queued
            self._silent = True
            self._allow(HEAD_SECONDS)

    def drop(self) -> None:
        self._stop_timer()
        self._silent = False
        self.transport.abort()

    def _allow(self, seconds: float) -> None:
        self._stop_timer()
        self._began = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._expired, seconds)

    def _expired(self, seconds: float) -> None:
        """Drop the connection, unless the client is still reading an answer."""
        unsent = self.transport.get_write_buffer_size()
        if self._silent and unsent and unsent != self._unsent:
            self._unsent = unsent
            self._timer = self.loop.call_later(seconds, self._expired, seconds)
        else:
            self.drop()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def server_options(log_level: str = "warning") -> dict[str, Any]:
    """For `uvicorn.run`, wherever a hub is started from. At the level `info` every request is logged."""
    handler = {"class": "logging.StreamHandler", "formatter": "lines"}
    return {
        "http": GuardedProtocol,
        "ws": "none",
        "access_log": False,  # the hub's own says whose token it was
        "timeout_graceful_shutdown": 10,
        "log_config": {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"lines": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
            "handlers": {"errors": handler},
            "loggers": {name: {"handlers": ["errors"], "level": log_level.upper()} for name in ("uvicorn", "mergetta")},
        },
    }
