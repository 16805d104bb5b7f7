"""How the presets `zo-merge-tuned` are chosen: on long streams at severity 3, while the tables report severity 5.

    python scripts/choose_presets.py fashion-bn      # some minutes on 2 cores
    python scripts/choose_presets.py fashion-vit

Prints the average error of each candidate in the last of five passes over 4,000 images of four domains, one of each
kind, one seed, and beside it the error in the first pass; the best in the last one wins.
"""

from __future__ import annotations

import sys

import numpy as np

from mergetta.bench.executors import ProcessExecutor
from mergetta.bench.reproduce.setting import FEW
from mergetta.bench.runner import Part, run_sweep
from mergetta.bench.store import default_cache
from mergetta.bench.suite import MethodSettings, load_suite

CANDIDATES = {
    "fashion-bn": [({}, d, lr) for d, lr in ((0.1, 0.002), (0.1, 0.01), (0.1, 0.02), (0.3, 0.01), (1.0, 0.01))],
    "fashion-vit": [({}, d, lr) for d, lr in ((1e-4, 2.5e-3), (1e-2, 2.5e-3), (1e-2, 5e-3), (1e-2, 1e-2), (0.1, 1e-2))]
    + [({"tolerance": 1e-2}, 1e-2, lr) for lr in (5e-3, 2e-2)]
    + [({"frozen_blocks": 1}, 1e-2, 5e-3)],
}


def main(name: str) -> None:
    suite = load_suite(name).with_streams(passes=5).restricted(severity=3)
    faithful = suite.methods["zo-merge"]
    methods = {"merge": suite.methods["merge"], "zo-merge (paper)": faithful}
    for changes, delta, lr in CANDIDATES[name]:
        settings = faithful.model_dump()
        settings["bundle"].update(changes)
        settings["options"].update(delta=delta, lr=lr)
        methods[f"{changes or ''} delta={delta} lr={lr}"] = MethodSettings(**settings)
    suite = suite.model_copy(update={"methods": methods})
    with ProcessExecutor() as executor:
        outcome = run_sweep([Part(suite, "roid", FEW, [0])], default_cache(), executor)
    (records,) = outcome.records
    passes = {m: np.mean([r["passes"] for r in records if r["method"] == m], axis=0) for m in suite.methods}
    for method, errors in sorted(passes.items(), key=lambda item: item[1][-1]):
        print(f"{errors[-1]:6.2f} (first pass {errors[0]:.2f})  {method}")


if __name__ == "__main__":
    main(sys.argv[1])
