"""A suite: a family, a set of domains and the settings of every method, as readable YAML."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mergetta.adapters import accepted_options, find_method
from mergetta.data.corruptions import CORRUPTIONS
from mergetta.data.own_images import check_domain
from mergetta.data.sources import open_source
from mergetta.data.streams import Order
from mergetta.errors import MergettaError

FOLDER = Path(__file__).parent / "suites"
INITIAL = {10: 0.35, 20: 0.15, 30: 0.10, 40: 0.10, 50: 0.05}
"""The paper's c_init by the number of style domains."""
Strict = ConfigDict(extra="forbid", frozen=True)


class BundleSettings(BaseModel):
    """Arguments of `build_bundle`; `frozen_blocks` last blocks do not move."""

    model_config = Strict
    keep: float | None = 0.4
    max_rank: int | None = 5
    tolerance: float | None = 1e-2
    initial: float = 0.1
    reduce: bool = True
    tolerance_per_entry: bool = True
    members: int = Field(default=16, ge=0)
    frozen_blocks: int = 1
    recipe: str | None = None
    """Another way to merge (`mergetta.merging.recipes`), instead of all of the above but `frozen_blocks`."""


class MethodSettings(BaseModel):
    """An adapter with its options; with a bundle if it works on one."""

    model_config = Strict
    adapter: str
    bundle: BundleSettings | None = None
    options: dict[str, float | int | bool | str] = Field(default_factory=dict)
    runtime: Literal["onnx", "int8"] | None = None
    """How the model runs on the device; by default in PyTorch."""
    mirror: Literal[True] | None = None
    """Average its predictions with those for the mirrored images: what that alone is worth."""
    runs: Literal[True] | None = None
    """Filter its predictions over time where classes come in runs (`adapters/wrappers/filtered.py`)."""
    head: Literal[True] | None = None
    """Let the classifier follow the stream (`adapters/wrappers/head.py`)."""

    @field_validator("mirror", "runs", "head", mode="before")
    @classmethod
    def unless_false(cls, value: object) -> object:
        return None if value is False else value

    pool: int | None = Field(default=None, gt=0)
    """How many experts it is given: of the other domains in random order, then again by other devices (seeds)."""

    @model_validator(mode="after")
    def check(self) -> MethodSettings:
        kind = find_method(self.adapter).load()
        unknown = set(self.options) - accepted_options(kind)
        if unknown:
            raise MergettaError(f"{self.adapter} has no option {min(unknown)!r}.")
        if (find_method(self.adapter).needs == "bundle") != (self.bundle is not None):
            raise MergettaError(f"{self.adapter} {'takes no' if self.bundle else 'needs its'} bundle settings.")
        if self.runtime and not find_method(self.adapter).deployable:
            raise MergettaError(f"{self.adapter} needs PyTorch's runtime, and cannot run on {self.runtime} models.")
        return self

    @property
    def uses_experts(self) -> bool:
        return find_method(self.adapter).needs in ("bundle", "experts")


class Suite(BaseModel):
    """What is compared with what, on which data."""

    model_config = Strict
    name: str
    family: str
    checkpoint: Path | None = None
    """The family's weights, if they do not come with it."""
    data: Literal[
        "fashion",
        "cifar10-c",
        "cifar100-c",
        "imagenet-c",
        "fashion-styles",
        "cifar10-styles",
        "imagenet-styles",
        "folder",
    ]
    """`folder`: one's own images (`mergetta.data.own_images`)."""
    folder: Path | None = None
    """Where the images are (default: below $MERGETTA_DATA)."""
    severity: int = Field(5, ge=1, le=5)
    samples: int = Field(gt=0)
    """Images per target domain."""
    first: int | None = Field(None, gt=0)
    """Only so many images of each target's stream; experts are made from all."""
    expert_samples: int | None = Field(None, gt=0)
    """Images per domain that experts are made from, other ones than the targets'; by default the same."""
    batch_size: int = Field(gt=0)
    """Of the targets' streams."""
    expert_batch_size: int | None = Field(None, gt=0)
    """Of the experts' training, and of what is measured on clean images; by default the same."""
    order: Order = "mixed"
    """Of the classes in the targets' streams (`Domain.indices`); experts are always made from mixed classes."""
    passes: int = Field(1, gt=0)
    """Over each target, for long streams: every pass draws its corruptions and its order anew."""
    domains: tuple[str, ...] = tuple(CORRUPTIONS)
    continual: bool = False
    """Whether the targets of a fold follow each other without a reset of the adapter; by default each starts anew."""
    folds: int | None = Field(None, gt=0)
    """How many folds the domains are dealt into, in turn: a target has the experts of all folds but its own. By
    default every domain is a fold of its own (leave one out); in a continual run there are two."""
    experts: dict[str, dict[str, float | int | bool | str]]
    methods: dict[str, MethodSettings] = Field(min_length=1)
    peers: dict[str, MethodSettings] = Field(default_factory=dict)
    """Methods that are compared only when asked for."""

    @model_validator(mode="after")
    def check(self) -> Suite:
        for expert in self.experts:
            if not find_method(expert).backprop:
                raise MergettaError(f"Experts are made by back-propagation, and {expert!r} is forward-only.")
        for domain in self.domains:
            if domain not in CORRUPTIONS and self.data != "folder" and not self.data.endswith("-styles"):
                raise MergettaError(f"There is no domain {domain!r}; choose from {', '.join(CORRUPTIONS)}.")
            if self.data == "folder" and self.folder and self.folder.is_dir():
                check_domain(self.folder, domain)
        return self

    def restricted(
        self,
        methods: Iterable[str] | None = None,
        domains: Iterable[str] | None = None,
        samples: int | None = None,
        severity: int | None = None,
    ) -> Suite:
        """The same suite with other methods (`all`: the peers too), fewer samples, or domains checked to exist."""
        known = {**self.methods, **self.peers}
        names = list(methods or self.methods)
        chosen = known if names == ["all"] else {name: self._known(name, known) for name in names}
        for domain in domains or ():
            if domain not in self.domains:
                raise MergettaError(f"There is no domain {domain!r}; choose from {', '.join(self.domains)}.")
        if samples is not None and samples > self.samples:
            raise MergettaError(f"The suite {self.name} has {self.samples:,} images per domain, not {samples:,}.")
        return self.changed(methods=chosen, samples=samples, severity=severity)

    @property
    def training_batch_size(self) -> int:
        """Whatever batches the target comes in, experts and what is known of the source have been made with these."""
        return self.expert_batch_size or self.batch_size

    def with_streams(
        self,
        batch_size: int | None = None,
        order: str | None = None,
        continual: bool = False,
        folds: int | None = None,
        passes: int | None = None,
    ) -> Suite:
        """The same suite with its targets in other streams; experts stay what they are."""
        kept = None if batch_size is None else self.training_batch_size
        streams = {"order": order, "continual": continual or None, "folds": folds, "passes": passes}
        return self.changed(batch_size=batch_size, expert_batch_size=kept, **streams)

    def changed(self, **changes: Any) -> Suite:
        """The same suite with these settings, as far as they are not None."""
        try:
            return Suite(**{**dict(self), **{name: value for name, value in changes.items() if value is not None}})
        except ValidationError as error:
            raise MergettaError(first_of(error)) from error

    @property
    def fold_count(self) -> int:
        return min(self.folds or (2 if self.continual else len(self.domains)), len(self.domains))

    def fold_of(self, domain: str) -> tuple[str, ...]:
        """The domains in the fold of this one."""
        return self.domains[self.domains.index(domain) % self.fold_count :: self.fold_count]

    @property
    def streams(self) -> str:
        """How the targets come, for the caption of a table."""
        text = f"batch {self.batch_size}, {self.order} order"
        if self.passes > 1:
            text += f", {self.passes} passes drawn anew"
        if self.continual:
            text += ", continual (no reset within a fold)"
        if self.fold_count == 1:
            text += ", 1 fold"
        elif self.continual or self.fold_count < len(self.domains):
            text += f", {self.fold_count} folds (experts of the other folds only)"
        return text

    def on(self, runtime: str) -> Suite:
        """The same suite with the methods that a device can run on its model; others stay as they are."""
        if runtime not in ("onnx", "int8"):
            raise MergettaError(f"Devices run onnx or int8 models, not {runtime!r}.")

        def moved(settings: MethodSettings) -> MethodSettings:
            deployable = find_method(settings.adapter).deployable
            return settings.model_copy(update={"runtime": runtime}) if deployable else settings

        tables = {"methods": self.methods, "peers": self.peers}
        return self.model_copy(update={k: {name: moved(m) for name, m in table.items()} for k, table in tables.items()})

    def _known(self, name: str, table: dict[str, MethodSettings]) -> MethodSettings:
        """A method by name; NAME+mirror, NAME+runs and NAME+head are any method with that wrapper around it."""
        plain, *wrappers = name.split("+")
        if plain not in table or not {"mirror", "runs", "head"}.issuperset(wrappers):
            raise MergettaError(
                f"The suite {self.name} has no method {name!r}; choose from {', '.join(table)}, each with +mirror, "
                "+runs or +head if you like."
            )
        return table[plain].model_copy(update=dict.fromkeys(wrappers, True))


def list_suites() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_suite(
    name: str,
    family: str | None = None,
    checkpoint: Path | None = None,
    folder: Path | None = None,
    styles: int | None = None,
) -> Suite:
    """A suite of the package by name, or one's own by the path of its YAML file.

    `styles` is the number of style domains, for suites that have them; c_init follows from it as in the paper. With
    `family`, for another family than the suite's own: by the preset that the suite has for it under `families`,
    or else by the suite's general settings.
    """
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        raise MergettaError(f"There is no suite {name!r}; choose one of {', '.join(list_suites())}, or a YAML file.")
    try:
        settings = yaml.safe_load(path.read_text())
        if not isinstance(settings, dict) or "family" not in settings:
            raise MergettaError("it does not say which family.")
        presets = settings.pop("families", {})
        settings = merged(settings, presets.get(family or settings["family"], {}))
        places = {"family": family, "checkpoint": checkpoint, "folder": folder}
        suite = Suite(name=path.stem, **{**settings, **{key: value for key, value in places.items() if value}})
    except MergettaError as error:
        raise MergettaError(f"{path} is not a valid suite: {error}") from error
    except ValidationError as error:
        raise MergettaError(f"{path} is not a valid suite: {first_of(error)}") from error
    except (yaml.YAMLError, TypeError, AttributeError, KeyError, UnicodeDecodeError) as error:
        raise MergettaError(f"{path} is not a valid suite: {' '.join(str(error).split())}") from error
    if suite.data.endswith("-styles"):
        return with_styles(suite, styles or 10)
    if styles:
        raise MergettaError(f"The suite {suite.name} has no styles.")
    return suite


def first_of(error: ValidationError) -> str:
    """The first things that are wrong, in a sentence: where each stands, and what pydantic says of it."""
    found = [
        f"{'.'.join(map(str, each['loc']))}: {each['msg']}".removeprefix(": ").replace("Value error, ", "").rstrip(".")
        for each in error.errors(include_url=False)
    ]
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return f"{'; '.join(found[:3])}{more}."


def with_styles(suite: Suite, count: int) -> Suite:
    """The suite on the first `count` style domains, with the paper's c_init for that many."""
    known = open_source(suite.data, suite.folder).domains
    if not 2 <= count <= len(known):
        raise MergettaError(f"There are {len(known)} styles here: choose 2 to {len(known)} of them, not {count}.")
    initial = INITIAL[max([number for number in INITIAL if number <= count], default=min(INITIAL))]
    methods = {
        name: method.model_copy(
            update={"bundle": method.bundle.model_copy(update={"initial": initial})} if method.bundle else {}
        )
        for name, method in suite.methods.items()
    }
    return suite.model_copy(update={"domains": known[:count], "methods": methods})


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings with some of them changed, at any depth."""
    result = dict(settings)
    for key, value in changes.items():
        before = result.get(key)
        result[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result
