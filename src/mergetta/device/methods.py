"""The methods that a device can run, with what it knows: a model, a bundle, options by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mergetta.adapters import accepted_options, check_options, create_adapter
from mergetta.adapters.base import Adapter
from mergetta.adapters.forward_only.normaliser import Normaliser
from mergetta.adapters.forward_only.zo_merge import ZOMerge
from mergetta.adapters.wrappers import wrapped
from mergetta.adapters.wrappers.governed import Governed
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.runtimes.onnx_runtime import OnnxRuntime
from mergetta.zeroth_order.spsa import DELTA

Options = Mapping[str, Any]


def race_merge(runtime: OnnxRuntime, bundle: Bundle, options: Options) -> Adapter:
    """Ours; features are aligned if the model was exported with those of clean images."""
    source = runtime.metadata.get("features")
    return create_adapter("race-merge", runtime, bundle=bundle, source=source, **options)


def zo_merge(runtime: OnnxRuntime, bundle: Bundle, options: Options) -> Adapter:
    """The paper's, with the experts' own loss, moments that follow the stream, and steps only where they are needed."""
    governing = {name: value for name, value in options.items() if name in accepted_options(Governed) - {"adapter"}}
    known: dict[str, Any] = {
        "bundle": bundle,
        "loss": bundle.settings.get("loss") or "roid",
        "delta": float(runtime.metadata.get("delta", DELTA)),
        "keep_history": 1000,
        "normalise": Normaliser.of_bundle(runtime, bundle),
    }
    stepping = {name: value for name, value in options.items() if name not in governing}
    check_options("zo-merge", Governed, governing)
    check_options("zo-merge", ZOMerge, stepping)
    return Governed(ZOMerge(runtime, **known | stepping), **governing)


METHODS: dict[str, Callable[[OnnxRuntime, Bundle, Options], Adapter]] = {"race-merge": race_merge, "zo-merge": zo_merge}


def create(
    method: str,
    runtime: OnnxRuntime,
    bundle: Bundle,
    options: Options,
    mirror: bool = False,
    runs: bool = True,
    head: bool = True,
) -> Adapter:
    """A method by name; with `mirror`, of two views of each image; with `runs`, filtered where classes come in runs;
    with `head`, its classifier follows the stream.
    """
    if method not in METHODS:
        raise MergettaError(f"A device runs {' or '.join(METHODS)}, not {method!r}.")
    reserved = {"bundle", "source", "normalise", "settings", "keep_history"} & set(options)
    if reserved:
        raise MergettaError(f"{method} takes no option {min(reserved)!r} here.")
    try:
        adapter = METHODS[method](runtime, bundle, options)
    except MergettaError:
        raise
    except (TypeError, ValueError) as error:
        raise MergettaError(f"An option of {method} has a wrong value: {error}.") from error
    return wrapped(adapter, mirror, runs, head)
