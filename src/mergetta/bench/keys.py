"""Cache keys: everything that a result or an expert depends on."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import torch

from mergetta.adapters import find_method
from mergetta.bench.cells import Cell, members
from mergetta.bench.inputs import clean_images, family_of, place_of, source_of
from mergetta.bench.store import address, code_digest
from mergetta.bench.suite import MethodSettings, Suite
from mergetta.errors import MergettaError

PROTOCOL = 1
"""Raise it when the protocol measures something else: all results are then measured again."""
CODE = ("data.sources", "models", "runtimes.torch_runtime")
"""What every result depends on, beside its adapter."""
TRAINING = "adapters.backprop.expert_training"


def data_facts(suite: Suite, domain: str, seed: int) -> dict[str, Any]:
    return {
        "family": family_of(suite).fingerprint,
        "data": source_of(suite).digest,
        "domain": domain,
        "severity": suite.severity,
        "samples": suite.samples,
        "seed": seed,
        "versions": [np.__version__, torch.__version__, cv2.__version__],
    }


def adapter_module(name: str) -> str:
    return f"adapters.{find_method(name).path.partition(':')[0]}"


def expert_key(suite: Suite, method: str, domain: str, seed: int) -> str:
    if method not in suite.experts:
        raise MergettaError(
            f"The suite {suite.name} has no experts by {method!r}; choose from {', '.join(suite.experts)}."
        )
    code = code_digest(*CODE, adapter_module(method), TRAINING)
    return address(
        {
            **data_facts(suite, domain, seed),
            "expert": method,
            "options": suite.experts[method],
            "expert_samples": suite.expert_samples,
            "batch_size": suite.training_batch_size,
            "code": code,
        }
    )


def modules_of(settings: MethodSettings) -> list[str]:
    """The code that a method's results depend on, its experts' aside."""
    method = find_method(settings.adapter)
    code = [*CODE, adapter_module(settings.adapter)]
    if settings.bundle is not None:
        code.append("merging.recipes" if settings.bundle.recipe else "merging.build")
    if method.prompts:
        code.append("runtimes.prompted")
    around = {"mirrored": settings.mirror, "filtered": settings.runs, "head": settings.head}
    code += [f"adapters.wrappers.{wrapper}" for wrapper, wanted in around.items() if wanted]
    if settings.runtime:
        code += ["runtimes.onnx_runtime", "runtimes.export", "runtimes.quantize"]
    return code


def code_of(settings: MethodSettings, expert: str) -> str:
    """A digest of the code of a method and, if it has any, of its experts: what a number was measured with."""
    made = [adapter_module(expert), TRAINING] if settings.uses_experts else []
    return code_digest(*modules_of(settings), *made)


def cell_key(suite: Suite, cell: Cell) -> str:
    settings = suite.methods[cell.method]
    method = find_method(settings.adapter)
    facts: dict[str, Any] = {
        **data_facts(suite, cell.domain, cell.seed),
        "batch_size": suite.batch_size,
        "order": suite.order,
        "before": cell.before,
        "method": settings.model_dump(exclude_none=True),
        "protocol": PROTOCOL,
        "code": code_digest(*modules_of(settings)),
    }
    if method.needs == "experts":
        signature = family_of(suite).signature
        facts["signature"] = None if signature is None else signature.tolist()
    if method.measured or settings.runtime == "int8":
        facts["clean"] = clean_images(place_of(suite), 1) is not None and suite.training_batch_size
    if suite.passes > 1:
        facts["passes"] = suite.passes
    if suite.first:
        facts["first"] = suite.first
    if cell.expert:
        facts["experts"] = [expert_key(suite, cell.expert, domain, seed) for domain, seed in members(suite, cell)]
    return address(facts)
