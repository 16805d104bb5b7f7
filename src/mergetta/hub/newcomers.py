"""The screening, as the store has it: who is looked at, who is the yardstick, and what is written of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.family_file import FamilyFile
from mergetta.hub.influence import LEAST, influences, usual_length
from mergetta.hub.probes import Probes, doubts, harmful
from mergetta.hub.records import ACTIVE, PENDING, QUARANTINED, RETIRED, ExpertRecord, FamilyRecord
from mergetta.hub.screening import fair, layout, screen, trusted
from mergetta.hub.settings import HubSettings
from mergetta.hub.store import Store
from mergetta.hub.store.storage import Unavailable

YARDSTICK = 256
"""Most experts that others are compared with: of each contributor one, before there is a second of any."""
RESCREEN = 1000
"""Pools up to this size are screened as a whole again: what was odd among six may be usual among twenty."""
AT_A_TIME = 5.0
"""Seconds for which experts are tried on probes before others have a turn: other families, and those tried already."""
FAINT = 0.25
"""Contributors that count no more than this in a merge have no voice: they pull aside what is usual."""


def judge_newcomers(
    store: Store,
    settings: HubSettings,
    family: FamilyRecord,
    file: FamilyFile,
    probes: Probes | None = None,
    keep_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Look at newcomers; in pools that are not large, at everybody again. Who is not approved waits, and so do all
    while there are no probes in a hub that wants them. False if some are still to be tried.
    """
    if probes is None and settings.wants_probes:
        return True
    waiting = set() if settings.open else store.unapproved()
    counts = store.counts(family.id, approved=not settings.open)
    whole = sum(counts.values()) - counts.get(RETIRED, 0) <= RESCREEN
    found = store.experts(family.id, (PENDING, ACTIVE, QUARANTINED) if whole else (PENDING,))
    found = [e for e in found if e.token not in waiting or (e.decided and e.state != QUARANTINED)]
    suspects = [e for e in found if not e.decided]
    if whole:
        voices = [*(e for e in found if e.decided and e.state != QUARANTINED), *suspects]
    else:
        voices = store.voices(family.id, YARDSTICK) or suspects
    reasons: dict[str, str] = {}
    complete = True
    if probes and settings.screen:
        first = fair(voices, YARDSTICK)
        usual = usual_length(trusted(first)) or usual_length(suspects)
        known, complete = tried(store, first, probes, usual, keep_on)
        if not complete:  # nobody is judged by half a yardstick
            return False
        rest = [e for e in (*found, *voices) if e.id not in known]
        others, complete = tried(store, rest, probes, usual, keep_on)
        known |= others
        voices, suspects = ([known[e.id] for e in experts if e.id in known] for experts in (voices, suspects))
        reasons = harmful(trusted(voices), suspects)
        voices = [e for e in voices if e.id not in reasons]
    voices = fair(voices, YARDSTICK)
    counts_for = weights_of(voices, usual_length(voices), family.probes)
    voices = [e for e in voices if e.decided or counts_for.get(e.token, 1.0) > FAINT]
    if settings.screen:
        reasons = {**screen(voices, suspects, layout(file.base)), **reasons}
    verdict = {e.id: (QUARANTINED, reasons[e.id]) if e.id in reasons else (ACTIVE, "") for e in suspects}
    changed = {e.id: verdict[e.id] for e in suspects if (e.state, e.reason) != verdict[e.id]}
    if changed:
        store.judge(family.id, changed)
    return complete


def weights_of(voices: Sequence[ExpertRecord], usual: float, probes: str) -> dict[str, float]:
    """What contributors count in the merge, as far as they pull it aside and as far as the probes doubt them."""
    found = influences(voices, usual)
    known = [expert for expert in voices if probes and expert.probes == probes]
    for token, weight in doubts(trusted(known), known).items():
        found[token] = max(LEAST, weight * found.get(token, 1.0))
    return found


def tried(
    store: Store, experts: Sequence[ExpertRecord], probes: Probes, usual: float, keep_on: Callable[[], bool]
) -> tuple[dict[str, ExpertRecord], bool]:
    """Those that have been tried, by id, with the harm that each does on the probe images: measured once, and noted.
    Whose content is lost is not among them. And whether there was time for all.
    """
    different = {each.id: each for each in experts}
    found = {name: expert for name, expert in different.items() if probes.knows(expert, usual)}
    until = time.monotonic() + AT_A_TIME
    others = [expert for expert in fair(list(different.values()), len(different)) if expert.id not in found]
    before = len(found)
    for expert in others:
        if len(found) > before and time.monotonic() > until:
            return found, False
        try:
            groups = Expert.from_bytes(store.blob(expert.id)).groups
        except Unavailable:
            raise
        except MergettaError:  # lost or damaged: it is not merged either
            continue
        harm = probes.harm(groups, usual, keep_on)
        store.note_harm(expert.id, probes.digest, usual, harm)
        found[expert.id] = replace(expert, probes=probes.digest, usual=usual, harm=harm)
    return found, True
