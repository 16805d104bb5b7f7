"""Do errors rise with severity? Per corruption and severity: not adapted, and with batch statistics.

python scripts/severity_results.py resnet-20 resnet20-12fca82f.th ../shared/data/cifar10 1000    # about 3 minutes
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np

from mergetta import TorchRuntime, load_family
from mergetta.data.corruptions import CORRUPTIONS
from mergetta.data.sources import open_source


def main(family: str, checkpoint: str, folder: str, samples: str) -> None:
    source = open_source("cifar10-c", Path(folder))
    runtime = TorchRuntime(load_family(family, checkpoint))
    rising = 0
    print(
        f"| {source.description}, {samples} images | source, severity 1 to 5 | bn-stats, severity 5 |\n|---|---|---:|"
    )
    for corruption in CORRUPTIONS:
        errors = []
        for severity in range(1, 6):
            domain = source.domain(corruption, severity, 0, int(samples))
            errors.append([error_of(runtime, domain, share) for share in ((1.0, 0.0) if severity == 5 else (1.0,))])
        plain = [values[0] for values in errors]
        rising += all(b >= a - 0.5 for a, b in pairwise(plain))
        print(f"| {corruption} | {' · '.join(f'{e:.1f}' for e in plain)} | {errors[4][1]:.1f} |", flush=True)
    print(f"\n{rising} of {len(CORRUPTIONS)} never fall by more than half a point from one severity to the next")


def error_of(runtime: TorchRuntime, domain, share: float) -> float:  # type: ignore[no-untyped-def]
    batches = list(domain.stream(0, 200))
    wrong = sum(int(np.count_nonzero(np.argmax(runtime(x, share).logits, axis=1) != y)) for x, y in batches)
    return 100 * wrong / len(domain.labels)


if __name__ == "__main__":
    main(*sys.argv[1:])
