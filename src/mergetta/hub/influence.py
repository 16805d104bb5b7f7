"""How much an expert and its contributor count in the merge.

Screening keeps out what is odd by itself. Crafted experts are not: each is as long as honest ones and points where they
do. What gives them away is that they agree with one another on a direction that nobody else takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mergetta.hub.records import ExpertRecord
from mergetta.hub.screening import MAJORITY, Vector, direction, middle

LONGEST = 1.2
"""Task vectors are shortened to so many times the usual length (norm bounding; Sun et al. 2019, Can you really backdoor
federated learning?): nobody gains by being long."""
SPREAD, FEW = 0.1, 0.5
"""Contributors may vary along one direction by 0.1 + 0.5 / N squares of the usual length: N of them have that much by
chance. (Honest ones, of one domain each: on `fashion-bn` 0.09 of 14 and 0.15 of 4, on `fashion-vit` 0.15 and 0.2.)"""
LEAST = 1 / 16
"""What a contributor counts at least, beside the 1 of others."""
ROUNDS = 60
AT_ONCE = 256
"""Contributors that are compared with one another: of more, each of several parts, which nobody chooses."""


def usual_length(experts: Sequence[ExpertRecord]) -> float:
    """Of task vectors: the median of the contributors' medians, rounded to a power of 1.1, so that few newcomers change
    it; 0 of none. Those of no length have no say.
    """
    of: dict[str, list[float]] = {}
    for expert in experts:
        if expert.norm > 0:
            of.setdefault(expert.token, []).append(expert.norm)
    usual = float(middle(np.array([np.median(norms) for norms in of.values()]))) if of else 0.0
    return float(1.1 ** np.round(np.log(usual) / np.log(1.1))) if usual > 0 else 0.0


def share(norm: float, usual: float) -> float:
    """How much of a task vector is merged; all of it where there is no usual length."""
    return LONGEST * usual / norm if 0 < LONGEST * usual < norm else 1.0


def influences(experts: Sequence[ExpertRecord], usual: float) -> dict[str, float]:
    """What each contributor counts in the merge: 1 for all, or less for some of a pool that a few pull aside.

    Powers of two, so that a newcomer seldom changes what others count.
    """
    of: dict[str, list[Vector]] = {}
    for expert in experts if usual > 0 else ():
        length = expert.norm * share(expert.norm, usual) / usual
        of.setdefault(expert.token, []).append(length * direction(expert.sketch))
    found: dict[str, float] = {}
    names = sorted(of)  # ids of tokens are random
    for i in range(0, len(names), AT_ONCE):
        part = names[i : i + AT_ONCE]
        found |= zip(part, filtered(np.stack([np.mean(of[name], axis=0) for name in part])).tolist(), strict=True)
    return found


def filtered(means: Vector) -> Vector:
    """(N,): weights under which no direction has more variance than honest contributors have (`SPREAD`).

    As long as one has, those that lie far out along it lose weight. A minority that is to move the mean must vary from
    it, and together: so what it gains is bounded, whatever it sends, and a pool without one is left as it is.

    References
    ----------
    Diakonikolas et al. 2017, Being robust (in high dimensions) can be practical: the filter. Shejwalkar and Houmansadr
    2021, Manipulating the Byzantine: the same against crafted updates of federated learning.
    """
    weights, products = np.ones(len(means)), np.asarray(means, np.float64) @ np.asarray(means, np.float64).T
    for _ in range(ROUNDS if len(means) >= MAJORITY else 0):
        shares = weights / weights.sum()
        inside = products @ shares
        apart = products - inside - inside[:, None] + shares @ inside  # products of what is left beside the mean
        roots = np.sqrt(shares)
        variances, directions = np.linalg.eigh(roots[:, None] * apart * roots)
        if variances[-1] <= SPREAD + FEW / len(means):
            break
        outwards = (apart @ (roots * directions[:, -1])) ** 2
        weights *= 1 - outwards / (2 * outwards.max())
        weights /= weights.max()
    return np.asarray(2.0 ** np.round(np.log2(np.maximum(weights, LEAST))))
