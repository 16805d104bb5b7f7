"""How the presets `zo-merge-tuned` were chosen: at severity 3, while the tables report severity 5.

    python scripts/choose_presets.py fashion-bn      # about 15 minutes on 2 cores
    python scripts/choose_presets.py fashion-vit

Prints the average error of each candidate over 15 domains, 2,000 images each, two seeds; the best wins.
"""

from __future__ import annotations

import sys

from mergetta.bench.executors import ProcessExecutor
from mergetta.bench.runner import Part, run_sweep
from mergetta.bench.store import default_cache
from mergetta.bench.suite import MethodSettings, load_suite
from mergetta.bench.tables import error_table

CANDIDATES = {
    "fashion-bn": [({}, d, lr) for d in (0.1, 0.3, 1.0) for lr in (0.002, 0.005, 0.02)],
    "fashion-vit": [({}, d, lr) for d, lr in ((1e-4, 2.5e-3), (1e-2, 2.5e-3), (1e-2, 5e-3), (1e-2, 1e-2), (0.1, 1e-2))]
    + [({"tolerance": 1e-2}, 1e-2, lr) for lr in (5e-3, 2e-2)]
    + [({"frozen_blocks": 1}, 1e-2, 5e-3)],
}


def main(name: str) -> None:
    suite = load_suite(name).restricted(samples=2000, severity=3)
    faithful = suite.methods["zo-merge"]
    methods = {"merge": suite.methods["merge"], "zo-merge (paper)": faithful}
    for changes, delta, lr in CANDIDATES[name]:
        settings = faithful.model_dump()
        settings["bundle"].update(changes)
        settings["options"].update(delta=delta, lr=lr)
        methods[f"{changes or ''} delta={delta} lr={lr}"] = MethodSettings(**settings)
    suite = suite.model_copy(update={"methods": methods})
    with ProcessExecutor() as executor:
        outcome = run_sweep([Part(suite, "roid", suite.domains, [0, 1])], default_cache(), executor)
    (records,) = outcome.records
    for method, number in sorted(error_table(records).average.items(), key=lambda item: item[1].mean):
        print(f"{number.mean:6.2f} ± {number.spread:.2f}  {method}")


if __name__ == "__main__":
    main(sys.argv[1])
