"""Who attacks a hub: experts that look honest and are made to do harm (`scripts/attacks.py` measures what they do).

Crafted experts raise the error on other images of the targets as far as the screening lets them: norm and direction of
honest experts, as a whole and in each layer. Adaptive attackers know the probes, as if they had the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from mergetta import Expert, TorchRuntime
from mergetta.groups import learnable, moment_pairs
from mergetta.hub.probes import FAR, RUIN, ProbeFile, Probes, most_harm
from mergetta.hub.screening import TINY
from mergetta.runtimes.torch_runtime import shares_of

Vector = dict[str, np.ndarray]
"""A task vector, by group."""
Labelled = tuple[np.ndarray, np.ndarray]
LONGER = 1.7
"""Times the median length of honest ones."""


def length_of(vector: Vector) -> float:
    return float(np.sqrt(sum(float(part @ part) for part in vector.values())))


class Attacker:
    """Knows all honest experts, the screening, labelled images like those of the targets, and if adaptive the probes.

    Its vectors are as long as the longest honest ones, 1.7 times the median.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        honest: Sequence[Expert],
        images: Sequence[Labelled],
        probes: Callable[[], ProbeFile],
    ) -> None:
        self.runtime, self.honest, self.images, self.probe_file = runtime, list(honest), images, probes
        self.base, self.names = runtime.groups, learnable(runtime.groups)
        tasks = [self.task(expert) for expert in honest]
        self.mean = {name: np.mean([each[name] for each in tasks], axis=0) for name in self.names}
        self.longest = {name: LONGER * np.median([np.linalg.norm(each[name]) for each in tasks]) for name in self.names}

    def task(self, expert: Expert) -> Vector:
        return {name: expert.groups[name] - self.base[name] for name in self.names}

    def with_task(self, expert: Expert, vector: Vector, domain: str) -> Expert:
        groups = {**expert.groups, **{name: self.base[name] + vector[name] for name in self.names}}
        return replace(expert, groups=groups, domain=domain)

    def scaled(self, expert: Expert, factor: float, domain: str) -> Expert:
        return self.with_task(expert, {name: factor * part for name, part in self.task(expert).items()}, domain)

    def far_moments(self, expert: Expert, share: float, domain: str) -> Expert:
        """Honest weights; moments on the other side of the source's, `share` times as far away as honest ones."""
        groups = dict(expert.groups)
        for name in groups:
            if name.endswith("running_mean"):
                groups[name] = self.base[name] - share * (groups[name] - self.base[name])
            elif name.endswith("running_var"):
                groups[name] = self.base[name] * (self.base[name] / np.maximum(groups[name], 1e-6)) ** share
        return replace(expert, groups=groups, domain=domain)

    def allowed(self, vector: Vector, cosine: float) -> Vector:
        """The nearest that has an honest length in each layer, and this cosine with the honest mean."""
        found = {}
        for name, part in vector.items():
            along = self.mean[name] / np.linalg.norm(self.mean[name])
            across = part - (part @ along) * along
            across *= (1 - cosine**2) ** 0.5 / max(float(np.linalg.norm(across)), 1e-12)
            found[name] = (self.longest[name] * (cosine * along + across)).astype(np.float32)
        return found

    def craft(self, cosine: float = 0.2, steps: int = 40) -> Vector:
        """With 0.2, as far as the screening lets through; honest experts have about 0.75."""
        vector = self.allowed(
            {name: np.random.default_rng(0).normal(size=self.base[name].size) for name in self.names}, cosine
        )
        for step in range(steps):
            images, labels = self.images[step % len(self.images)]
            tensors = {name: torch.from_numpy(part).requires_grad_() for name, part in vector.items()}
            moved = {name: torch.from_numpy(self.base[name]) + 1.4 * tensor for name, tensor in tensors.items()}
            logits = self.runtime.forward(images, moved).logits
            torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels)).backward()
            steps_of = {n: t.grad.numpy() / max(float(t.grad.norm()), 1e-12) for n, t in tensors.items()}
            vector = self.allowed({n: vector[n] + self.longest[n] * steps_of[n] for n in self.names}, cosine)
        return vector

    def craft_moments(self, count: int, cosine: float = 0.0, steps: int = 40) -> list[Expert]:
        """Honest weights; moments 3.5 times as far off as the median ones in each layer, made to do most harm to the
        targets, with a cosine with the honest mean that the screening lets pass.
        """
        pairs, images = moment_pairs(self.base), self.images
        rooted = {m: np.sqrt(self.base[v] + TINY) for m, v in pairs}
        logs = {v: np.log(self.base[v] + TINY) for _, v in pairs}
        ways = [
            {m: np.stack([(e.groups[m] - self.base[m]) / rooted[m], np.log(e.groups[v] + TINY) - logs[v]])
             for m, v in pairs}
            for e in self.honest
        ]  # fmt: skip
        mean = {m: np.mean([way[m] for way in ways], axis=0) for m, _ in pairs}
        far = {m: 3.5 * np.median([np.linalg.norm(way[m]) for way in ways]) for m, _ in pairs}
        usual = {n: torch.from_numpy(self.base[n] + self.mean[n]) for n in self.names}
        given = shares_of(1.0, sum(mean[m].shape[1] for m in mean))

        def allowed(way: Vector) -> Vector:
            found = {}
            for m, part in way.items():
                along = mean[m] / np.linalg.norm(mean[m])
                across = part - (part * along).sum() * along
                across *= (1 - cosine**2) ** 0.5 / max(float(np.linalg.norm(across)), 1e-12)
                found[m] = (far[m] * (cosine * along + across)).astype(np.float32)
            return found

        found = allowed({m: np.random.default_rng(0).normal(size=part.shape) for m, part in mean.items()})
        for step in range(steps):  # a scale and a shift can do what given moments do, and have gradients
            tensors, moved = {m: torch.from_numpy(part).requires_grad_() for m, part in found.items()}, dict(usual)
            for m, tensor in tensors.items():
                scale, shift = (m.replace("running_mean", part) for part in ("weight", "bias"))
                moved[scale] = usual[scale] * (-tensor[1] / 2).exp()
                moved[shift] = usual[shift] - tensor[0] * moved[scale]
            x, y = images[step % len(images)]
            logits = self.runtime._run(self.runtime._prepare(x), {**self.runtime._source, **moved}, given, False).logits
            torch.nn.functional.cross_entropy(logits, torch.from_numpy(y)).backward()
            steps_of = {m: t.grad.numpy() / max(float(t.grad.norm()), 1e-12) for m, t in tensors.items()}
            share = 1 - step / steps
            found = allowed({m: part + share * far[m] * steps_of[m] for m, part in found.items()})
        crafted = {}
        for m, v in pairs:
            crafted[m] = self.base[m] + found[m][0] * rooted[m]
            crafted[v] = (self.base[v] + TINY) * np.exp(found[m][1]) - TINY
        return [
            replace(e, groups={**e.groups, **{n: np.float32(part * (1 + i / 1000)) for n, part in crafted.items()}},
                    domain=f"evil-{i}")
            for i, e in enumerate((self.honest * 2)[:count])
        ]  # fmt: skip

    def told_apart(self, count: int, cosine: float = 0.75) -> list[Expert]:
        """As like the honest mean as honest ones; half of the rest is crafted, half is an honest expert's own, so that
        they are hardly more like one another than others are.
        """
        crafted, found = self.craft(cosine), []
        for i in range(count):
            honest, mixed = self.task(self.honest[i % len(self.honest)]), {}
            for name, part in crafted.items():
                along = self.mean[name] / np.linalg.norm(self.mean[name])
                aside, own = (vector - (vector @ along) * along for vector in (part, honest[name]))
                own = own - (own @ aside) / max(float(aside @ aside), 1e-12) * aside
                lengths = [max(float(np.linalg.norm(vector)), 1e-12) for vector in (aside, own)]
                mixed[name] = aside / lengths[0] + own / lengths[1]
            found.append(self.with_task(self.honest[i % len(self.honest)], self.allowed(mixed, cosine), f"evil-{i}"))
        return found

    def tries(self, count: int) -> None:
        """What it needs to know of the probes, to have so many experts pass. They will be as long as the usual ones."""
        if not hasattr(self, "probes"):
            self.probes = Probes(self.probe_file(), runtime=self.runtime)
            usual = np.median([length_of(self.task(expert)) for expert in self.honest])
            self.usual = float(1.1 ** np.round(np.log(usual) / np.log(1.1)))  # as the hub rounds it
            self.harms = [self.probes.harm(expert.groups, self.usual) for expert in self.honest]
        self.goal = most_harm([*self.harms, *[np.log(RUIN)] * count])[0] - 0.02  # so as to count fully

    def passing(self, expert: Expert, vector: Vector) -> Vector:
        """The largest share of a vector, the rest an honest expert's own, that the probes let pass."""
        low, high, own = 0.0, 1.0, self.task(expert)
        for _ in range(7):
            share = (low + high) / 2
            mixed = {n: (1 - share) * own[n] + share * vector[n] for n in self.names}
            harm = self.probes.harm(self.with_task(expert, mixed, "").groups, self.usual)
            low, high = (share, high) if harm < self.goal else (low, share)
        mixed = {n: (1 - low) * own[n] + low * vector[n] for n in self.names}
        return {n: np.float32(self.usual / length_of(mixed)) * part for n, part in mixed.items()}

    def let_pass(self, count: int, vector: Vector) -> list[Expert]:
        """As much of a vector in each as the probes let pass."""
        self.tries(count)
        chosen = [self.honest[i % len(self.honest)] for i in range(count)]
        return [self.with_task(e, self.passing(e, vector), f"evil-{i}") for i, e in enumerate(chosen)]

    def kind(self, count: int, parts: int = 1, steps: int = 80) -> list[Vector]:
        """Vectors that are each harmless on the probes, far along, and whose mean does most harm to the targets when it
        is half of the merge.
        """
        self.tries(count)
        rng, mean = np.random.default_rng(0), {n: torch.from_numpy(part) for n, part in self.mean.items()}
        found = [self.allowed({n: rng.normal(size=self.base[n].size) for n in self.names}, 0.75) for _ in range(parts)]
        base = {n: torch.from_numpy(self.base[n]) for n in self.names}
        for step in range(steps):
            images, labels = self.images[step % len(self.images)]
            tensors = [{n: torch.from_numpy(part).requires_grad_() for n, part in each.items()} for each in found]
            middle = {n: sum(each[n] for each in tensors) / parts for n in self.names}
            logits = self.runtime.forward(images, {n: base[n] + 0.7 * (mean[n] + middle[n]) for n in self.names}).logits
            gain = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels))
            gain = gain - 3 * sum(self.suspicion(each, base, step) for each in tensors)
            gain.backward()
            for i, each in enumerate(tensors):
                steps_of = {n: t.grad.numpy() / max(float(t.grad.norm()), 1e-12) for n, t in each.items()}
                share = 1 - step / steps
                found[i] = self.allowed(
                    {n: found[i][n] + share * self.longest[n] * steps_of[n] for n in self.names}, 0.75
                )
        return found

    def suspicion(self, vector: dict[str, torch.Tensor], base: dict[str, torch.Tensor], step: int) -> torch.Tensor:
        """How far a vector is above its goal on three of the views."""
        length = torch.sqrt(sum((part**2).sum() for part in vector.values()))
        moved = {n: base[n] + FAR * self.usual / length * part for n, part in vector.items()}
        expected, losses = torch.from_numpy(self.probes.expected), []
        for i in range(3):
            view = self.probes.views[(3 * step + i) % len(self.probes.views)]
            logits = self.runtime.forward(view, moved).logits.double()
            losses.append(-(expected * torch.log_softmax(logits, 1)).sum(1).mean())
        return torch.relu(torch.log(sum(losses) / 3 / self.probes.own) - self.goal + 0.1)

    def one_by_one(self, count: int) -> list[Expert]:
        """Two kinds in turn, each harmless on the probes: together they are not."""
        first, second = (self.let_pass(count, vector) for vector in self.kind(count, 2))
        return [(first, second)[i % 2][i] for i in range(count)]

    def uploads(self, count: int, vector: Vector) -> list[Expert]:
        """All different, with the moments of honest experts."""
        rng = np.random.default_rng(1)
        return [
            self.with_task(
                self.honest[i % len(self.honest)],
                {n: part + 0.02 * self.longest[n] * rng.normal(size=part.size) / part.size**0.5
                 for n, part in vector.items()},
                f"evil-{i}",
            )
            for i in range(count)
        ]  # fmt: skip
