"""Test-time-adaptation methods by name. A method is one file; this table is the registry."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from numbers import Real
from typing import Any

from mergetta.adapters.base import Adapter
from mergetta.errors import MergettaError, how_to_install
from mergetta.runtimes.base import Runtime


@dataclass(frozen=True)
class Method:
    """Where a method lives and what it needs; nothing is imported before it is created."""

    path: str
    needs: str = ""
    """What it must be given beside a runtime: `bundle`, `experts`, `source` (`source_features.py`), or nothing."""
    measured: str = ""
    """An option that is measured on clean images, for which it is better off: `source`, `fisher`, `prototypes`."""
    prompts: bool = False
    """Whether it moves prompts, which its runtime must then have (`PromptedRuntime`)."""
    passes: float = 3
    """Its cost in forward passes, roughly: a backward pass counts two, a second view what is kept of it."""

    @property
    def backprop(self) -> bool:
        return self.path.startswith("backprop.")

    @property
    def deployable(self) -> bool:
        """Whether it runs on the model of a device."""
        return not (self.backprop or self.prompts)

    def load(self) -> type[Adapter]:
        module, _, name = self.path.partition(":")
        try:
            loaded = getattr(import_module(f"mergetta.adapters.{module}"), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise MergettaError(f"Back-propagation needs PyTorch: {how_to_install('torch')}") from error
        if not (isinstance(loaded, type) and issubclass(loaded, Adapter)):
            raise TypeError(f"{self.path} is registered as an adapter but is none")
        return loaded


METHODS: dict[str, Method] = {
    "source": Method("forward_only.source:Source", passes=1),
    "bn-stats": Method("forward_only.bn_stats:BNStats", passes=1),
    "t3a": Method("forward_only.t3a:T3A", passes=1),
    "lame": Method("forward_only.lame:LAME", passes=1),
    "bn-alpha": Method("forward_only.bn_alpha:BNAlpha", passes=1),
    "adabn": Method("forward_only.adabn:AdaBN", passes=1),
    "dua": Method("forward_only.dua:DUA", passes=1),
    "unmix-tns": Method("forward_only.unmix_tns:UnMixTNS", passes=3),
    "zoa": Method("forward_only.zoa:ZOA", needs="source", measured="source", passes=2),
    "foa": Method("forward_only.foa:FOA", needs="source", measured="source", prompts=True, passes=28),
    "fozo": Method("forward_only.fozo:FOZO", needs="source", measured="source", prompts=True, passes=2),
    "cola": Method("forward_only.cola:CoLA", needs="experts", passes=1),
    "entropy-merge": Method("forward_only.entropy_merge:EntropyMerge", needs="experts", passes=16),
    "merge": Method("forward_only.merge:Merge", needs="bundle", passes=1),
    "zo-merge": Method("forward_only.zo_merge:ZOMerge", needs="bundle", passes=4.5),
    "race-merge": Method("forward_only.race_merge:RaceMerge", needs="bundle", measured="source", passes=2),
    "tent": Method("backprop.tent:Tent"),
    "deyo": Method("backprop.deyo:DeYO", passes=4),
    "roid": Method("backprop.roid:ROID", passes=5.5),
    "eata": Method("backprop.eata:EATA", measured="fisher"),
    "sar": Method("backprop.sar:SAR", passes=6),
    "cotta": Method("backprop.cotta:CoTTA", passes=36),
    "rmt": Method("backprop.rmt:RMT", measured="prototypes", passes=9),
    "hybrid": Method("backprop.hybrid:Hybrid", needs="bundle", passes=10),
    "adamerging": Method("backprop.adamerging:AdaMerging", needs="experts"),
}


def list_adapters() -> list[str]:
    """Names that `create_adapter` knows.

    >>> "race-merge" in list_adapters()
    True
    """
    return list(METHODS)


def find_method(name: str) -> Method:
    if name not in METHODS:
        raise MergettaError(f"There is no adapter {name!r}; choose one of {', '.join(METHODS)}.")
    return METHODS[name]


def create_adapter(name: str, runtime: Runtime, **options: Any) -> Adapter:
    """An adapter by name, with the options of its constructor.

    Parameters
    ----------
    name
        One of `list_adapters()`.
    runtime
        The model.
    options
        What the method needs (`bundle`, `experts` or `source`), and its settings.

    Examples
    --------
    >>> from mergetta import TorchRuntime, load_family
    >>> adapter = create_adapter("bn-alpha", TorchRuntime(load_family("fashion-bn")), prior=8)
    """
    kind = find_method(name).load()
    check_options(name, kind, options)
    needs = METHODS[name].needs
    if needs and needs not in options:
        raise MergettaError(f"{name} needs {needs}=….")
    return kind(runtime, **options)


def check_options(name: str, kind: type, options: Mapping[str, Any]) -> None:
    """Raise unless a method takes all of them, numbers where it wants numbers."""
    accepted = option_types(kind)
    unknown = set(options) - set(accepted)
    if unknown:
        raise MergettaError(f"{name} has no option {min(unknown)!r}; it takes {', '.join(sorted(accepted))}.")
    for option, value in options.items():
        types = set(accepted[option].split(" | "))
        switch = isinstance(value, bool)
        wrong = not switch if types == {"bool"} else switch or not isinstance(value, Real | None)
        if wrong and types <= {"bool", "int", "float", "None"}:
            wanted = "true or false" if types == {"bool"} else "a number"
            raise MergettaError(f"The option {option} of {name} must be {wanted}, not {value!r}.")


def accepted_options(kind: type) -> set[str]:
    """The names of a method's options."""
    return set(option_types(kind))


def option_types(kind: type) -> dict[str, str]:
    """Keywords of the constructor and their types as written there, following **options to the base classes and to the
    method's settings.
    """
    types: dict[str, str] = {}
    for cls in kind.__mro__:
        if "__init__" not in vars(cls):
            continue
        parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
        named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        types |= {p.name: str(p.annotation) for p in named if p.name not in types}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    if hasattr(kind, "Settings"):
        types |= {field.name: str(field.type) for field in fields(kind.Settings)}
    return {name: written for name, written in types.items() if name not in ("self", "runtime")}
