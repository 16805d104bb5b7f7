"""What devices report: the last of each, and a bounded history."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from mergetta.hub.records import DeviceRecord
from mergetta.hub.settings import Limits
from mergetta.hub.store.schema import devices, families, reports
from mergetta.hub.store.storage import Refused, Storage, reachable, record, repeated, unknown


class ReportStore(Storage):
    reports_kept: int
    """Per device."""
    limits: Limits

    def add_reports(self, entries: Sequence[Mapping[str, Any]], token: str) -> None:
        """A device that got no answer sends again: a report of the same device and time is taken once."""
        with reachable():
            repeated(lambda: self._add_reports(entries, token))

    def _add_reports(self, entries: Sequence[Mapping[str, Any]], token: str) -> None:
        now = time.time()
        with self.database.write() as connection:
            for family in sorted({entry["family"] for entry in entries}):
                held = (
                    sa.select(families.c.id).where(families.c.id == family).with_for_update(read=True, key_share=True)
                )
                if connection.execute(held).first() is None:
                    raise unknown(family)
            for family, device in sorted({(entry["family"], entry["device"]) for entry in entries}):
                mine = [entry for entry in entries if (entry["family"], entry["device"]) == (family, device)]
                same = sa.and_(devices.c.family == family, devices.c.device == device)
                seen = {"token": token, "last_seen": now, "last": dict(mine[-1])}
                if not connection.execute(devices.update().where(same).values(**seen)).rowcount:
                    self._check_room(connection, family, token)
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

    def _check_room(self, connection: sa.Connection, family: str, token: str) -> None:
        held = sa.select(sa.func.count()).where(devices.c.family == family, devices.c.token == token)
        if connection.execute(held).scalar_one() >= self.limits.devices_per_token:
            raise Refused(
                f"This token has {self.limits.devices_per_token} devices of this family, the most it may have."
            )

    def forget_devices(self, family: str) -> None:
        """Those that have not been heard of in a long time, and their reports."""
        edge = time.time() - self.limits.device_days * 86400
        old = sa.select(devices.c.device).where(devices.c.family == family, devices.c.last_seen < edge)
        with reachable(), self.database.write() as connection:
            gone = list(connection.execute(old).scalars())
            for table in (reports, devices) if gone else ():
                connection.execute(table.delete().where(table.c.family == family, table.c.device.in_(gone)))

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
