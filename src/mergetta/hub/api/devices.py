"""What devices report."""

from __future__ import annotations

from typing import Annotated

from fastapi import HTTPException, Path

from mergetta.hub.access import check_scope
from mergetta.hub.api.parts import MISSING, Anyone, Consumer, FamilyName, TheHub, guarded
from mergetta.hub.shapes import NAME, DeviceShape, Report, Reports, Taken

router = guarded("devices")


@router.post("/reports", status_code=201, responses=MISSING)
def post_reports(reports: Reports, hub: TheHub, token: Consumer) -> Taken:
    """How devices are doing; several at once after a time without connection."""
    for report in reports:
        check_scope(token, report.family)
        if token.device not in (None, report.device):
            raise HTTPException(403, f"This token reports for {token.device!r}, not for {report.device!r}.")
    hub.store.add_reports([report.model_dump() for report in reports], token.id)
    return Taken(taken=len(reports))


@router.get("/families/{family}/devices", responses=MISSING)
def list_devices(family: FamilyName, hub: TheHub, token: Anyone) -> list[DeviceShape]:
    hub.store.family(family)
    latest = hub.store.latest(family)
    return [
        DeviceShape(
            family=family,
            device=device.device,
            first_seen=device.first_seen,
            last_seen=device.last_seen,
            has_latest=device.last.get("bundle") in latest,
            last=Report(**device.last),
        )
        for device in hub.store.devices(family)
    ]


@router.get("/families/{family}/devices/{device}/reports", responses=MISSING)
def list_reports(
    family: FamilyName, device: Annotated[str, Path(pattern=NAME)], hub: TheHub, token: Anyone
) -> list[Report]:
    """Oldest first."""
    hub.store.family(family)
    return [Report(**report) for report in hub.store.reports(family, device)]
