"""The screening, as the store has it: who is looked at, who is the yardstick, and what is written of it."""

from __future__ import annotations

from mergetta.family_file import FamilyFile
from mergetta.hub.influence import influences, usual_length
from mergetta.hub.records import ACTIVE, PENDING, QUARANTINED, RETIRED, FamilyRecord
from mergetta.hub.screening import fair, layout, screen
from mergetta.hub.settings import HubSettings
from mergetta.hub.store import Store

YARDSTICK = 256
"""Most experts that others are compared with: of each contributor one, before there is a second of any."""
RESCREEN = 1000
"""Pools up to this size are screened as a whole again: what was odd among six may be usual among twenty."""
FAINT = 0.25
"""Contributors that count no more than this in a merge have no voice: they pull aside what is usual."""


def judge_newcomers(store: Store, settings: HubSettings, family: FamilyRecord, file: FamilyFile) -> None:
    """Look at newcomers; in pools that are not large, at everybody again. Who is not approved waits."""
    waiting = set() if settings.open else store.unapproved()
    counts = store.counts(family.id, approved=not settings.open)
    whole = sum(counts.values()) - counts.get(RETIRED, 0) <= RESCREEN
    found = store.experts(family.id, (PENDING, ACTIVE, QUARANTINED) if whole else (PENDING,))
    suspects = [e for e in found if not e.decided and e.token not in waiting]
    if whole:
        voices = [*(e for e in found if e.decided and e.state != QUARANTINED), *suspects]
    else:
        voices = store.voices(family.id, YARDSTICK)
    voices = fair(voices, YARDSTICK)
    counts_for = influences(voices, usual_length(voices))
    voices = [e for e in voices if e.decided or counts_for.get(e.token, 1.0) > FAINT]
    reasons = screen(voices, suspects, layout(file.base)) if settings.screen else {}
    verdict = {e.id: (QUARANTINED, reasons[e.id]) if e.id in reasons else (ACTIVE, "") for e in suspects}
    changed = {e.id: verdict[e.id] for e in suspects if (e.state, e.reason) != verdict[e.id]}
    if changed:
        store.judge(family.id, changed)
