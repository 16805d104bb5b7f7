"""What devices report: the last of each, and a bounded history."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from mergetta.hub.records import DeviceRecord
from mergetta.hub.schema import devices, families, reports
from mergetta.hub.storage import NotThere, Storage, reachable, record, repeated


class ReportStore(Storage):
    reports_kept: int
    """Per device."""

    def add_reports(self, entries: Sequence[Mapping[str, Any]], token: str) -> None:
        """A device that got no answer sends again: a report of the same device and time is taken once."""
        with reachable():
            repeated(lambda: self._add_reports(entries, token))

    def _add_reports(self, entries: Sequence[Mapping[str, Any]], token: str) -> None:
        now = time.time()
        with self.database.write() as connection:
            for family in {entry["family"] for entry in entries}:
                if connection.execute(sa.select(families.c.id).where(families.c.id == family)).first() is None:
                    raise NotThere(f"The hub does not know the family {family!r}: register it first.")
            for family, device in {(entry["family"], entry["device"]) for entry in entries}:
                mine = [entry for entry in entries if (entry["family"], entry["device"]) == (family, device)]
                same = sa.and_(devices.c.family == family, devices.c.device == device)
                seen = {"token": token, "last_seen": now, "last": dict(mine[-1])}
                if not connection.execute(devices.update().where(same).values(**seen)).rowcount:
                    connection.execute(devices.insert().values(family=family, device=device, first_seen=now, **seen))
                of_device = sa.and_(reports.c.family == family, reports.c.device == device)
                times = sa.select(reports.c.time).where(of_device, reports.c.time.in_([e["time"] for e in mine]))
                known = set(connection.execute(times).scalars())
                rows = [
                    {"family": family, "device": device, "time": entry["time"], "report": dict(entry)}
                    for entry in mine
                    if entry["time"] not in known
                ]
                if rows:
                    connection.execute(reports.insert(), rows)
                newest = sa.select(reports.c.number).where(of_device).order_by(reports.c.number.desc())
                edge = connection.execute(newest.offset(self.reports_kept).limit(1)).scalar()
                if edge is not None:
                    connection.execute(reports.delete().where(of_device, reports.c.number <= edge))

    def devices(self, family: str, limit: int = 1000) -> list[DeviceRecord]:
        """Those heard of last, by name."""
        latest = sa.select(devices).where(devices.c.family == family).order_by(devices.c.last_seen.desc()).limit(limit)
        chosen = latest.subquery()
        query = sa.select(chosen).order_by(chosen.c.device)
        with reachable(), self.database.read() as connection:
            return [record(DeviceRecord, row) for row in connection.execute(query).all()]

    def reports(self, family: str, device: str) -> list[dict[str, Any]]:
        """Oldest first."""
        query = sa.select(reports.c.report).where(reports.c.family == family, reports.c.device == device)
        with reachable(), self.database.read() as connection:
            return [row.report for row in connection.execute(query.order_by(reports.c.number)).all()]
