"""Every table and figure of the paper: one module each, with the parts it measures and what it makes of the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mergetta.bench.executors import Executor
from mergetta.bench.reproduce.setting import Setting
from mergetta.bench.runner import Part, Progress, run_sweep
from mergetta.bench.sheets import Study
from mergetta.bench.store import Store
from mergetta.errors import MergettaError

STUDIES = ("corruption-table", "style-table", "ablation", "dimensions", "memory", "sensitivity", "quantised")
LIBRARIES = ("mergetta", "numpy", "torch", "onnxruntime", "opencv-python-headless")


def chosen_studies(what: str) -> tuple[str, ...]:
    if what != "all" and what not in STUDIES:
        raise MergettaError(f"There is no study {what!r}; choose one of {', '.join(STUDIES)}, all.")
    return STUDIES if what == "all" else (what,)


def module_of(study: str) -> Any:
    return import_module(f"mergetta.bench.reproduce.{study.replace('-', '_')}")


def parts_of(study: str, setting: Setting) -> dict[str, Part]:
    parts: dict[str, Part] = module_of(study).parts(setting)
    return parts


def reproduce(
    study: str, setting: Setting, cache: Path, executor: Executor, command: str, progress: Progress
) -> tuple[Study, list[str]]:
    """The study, and a sentence for everything that failed; what did not is in the study."""
    module = module_of(study)
    parts = parts_of(study, setting)
    outcome = run_sweep(list(parts.values()), cache, executor, progress)
    records = dict(zip(parts, outcome.records, strict=True))
    sheets, drawings = module.outcome(setting, records, Store(cache))
    notes = [*module.NOTES, *(f"Failed and left out: {sentence}" for sentence in outcome.failures)]
    facts = facts_of(setting, list(parts.values()), command)
    kept = [slim(record, part) for part, found in records.items() for record in found]
    return (
        Study(study, module.TITLE, label(setting), facts, tuple(sheets), tuple(drawings), tuple(notes), tuple(kept)),
        list(outcome.failures),
    )


def label(setting: Setting) -> str:
    """Of the suite, with the family if it is another than the suite's own."""
    family = setting.suite.family.replace(":", "-").replace("/", "-")
    return setting.suite.name if family in setting.suite.name else f"{setting.suite.name}-{family}"


def slim(record: Mapping[str, Any], part: str) -> dict[str, Any]:
    """A record without what only figures need."""
    drawn = ("wrong", "sizes", "ranks", "predicted")
    return {"part": part, **{key: value for key, value in record.items() if key not in drawn}}


def facts_of(setting: Setting, parts: Sequence[Part], command: str) -> dict[str, Any]:
    suites = [part.suite for part in parts] or [setting.suite]
    domains = max((part.domains for part in parts), key=len, default=setting.domains)
    seeds = len(setting.seeds)
    images = sorted({suite.first or suite.samples for suite in suites})
    return {
        "command": command,
        "description": (
            f"{setting.suite.name}, family {setting.suite.family}, severity {setting.suite.severity}, "
            f"{' or '.join(f'{count:,}' for count in images)} images per domain, {setting.suite.streams}, "
            f"{seeds} seed{'s' if seeds > 1 else ''}, {len(domains)} domain{'s' if len(domains) > 1 else ''}."
        ),
        "seeds": list(setting.seeds),
        "domains": list(domains),
        "versions": {library: version(library) for library in LIBRARIES},
        "settings": setting.suite.model_dump(mode="json", exclude={"checkpoint", "folder"}),
    }
