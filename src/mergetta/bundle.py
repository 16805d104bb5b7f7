"""A bundle: what a weak device needs to merge the experts and to tune the merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError
from mergetta.files import decode, encode, expect, expect_names, read_bytes, sha256, write_atomically
from mergetta.groups import (
    GroupValues,
    Vector,
    as_float32,
    as_mixed,
    check_groups,
    from_mixed,
    learnable,
    mixture_shares,
    moment_pairs,
)
from mergetta.streams.variances import Variances

FORMAT, VERSION = "mergetta.bundle", 3
PARTS = ("base", "basis", "coefficients")
VARIANCES = ("images", "domains")
COUNTS = ("experts", "contributors")
MOMENTS = ("signatures", "features")


@dataclass(frozen=True, eq=False)
class Members:
    """What a bundle keeps of each expert, or of a cluster of similar ones: the mean of its own.

    A member's groups are θ₀ + its coordinates in the bundle's basis and in the `further` directions, which the paper's
    method does not move.
    """

    names: tuple[str, ...]
    """Domains, one name per member."""
    coordinates: Mapping[str, NDArray[np.floating[Any]]]
    """(M, r + k) per group."""
    further: Mapping[str, NDArray[np.floating[Any]]]
    """(k, D) per group: orthonormal rows, also to those of the basis."""
    experts: NDArray[np.int64]
    """(M,): how many experts each stands for."""
    contributors: NDArray[np.int64]
    """(M,): how many have contributed to it."""
    weights: Vector
    """(M,): how much each counts beside the others until a stream has told, 1 at most: as its contributors, all of whom
    count the same, but no more than one of them. So nobody gains by many uploads, nor many by being alike."""
    signatures: NDArray[np.floating[Any]] | None = None
    """(M, 2, C): moments after the stem, if most experts tell. A member that does not has those of all together."""
    features: NDArray[np.floating[Any]] | None = None
    """(M, 2, F): moments of the classifier's input, for models without BatchNorm, in the same way."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        for name in ("coordinates", "further"):
            object.__setattr__(self, name, as_float32(getattr(self, name)))
        for name in MOMENTS:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float32))
        for name in COUNTS:
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.int64))
        object.__setattr__(self, "weights", np.asarray(self.weights, dtype=np.float32))

    def check(self, base: GroupValues, basis: GroupValues) -> None:
        """Raise unless they fit a bundle."""
        count = len(self.names)
        fits = count > 0 and set(self.coordinates) == set(self.further) == set(base)
        for name, vector in base.items() if fits else ():
            further = self.further[name]
            fits &= further.shape == (len(further), vector.size)
            fits &= self.coordinates[name].shape == (count, len(basis[name]) + len(further))
            fits &= bool(np.isfinite(further).all() and np.isfinite(self.coordinates[name]).all())
        for kind in COUNTS:
            fits &= getattr(self, kind).shape == (count,) and bool((getattr(self, kind) > 0).all())
        fits &= self.weights.shape == (count,) and bool(((self.weights > 0) & (self.weights <= 1)).all())
        for kind in MOMENTS:
            told = getattr(self, kind)
            if told is not None:
                fits &= told.ndim == 3 and told.shape[:2] == (count, 2) and told.size > 0
                fits = fits and bool(np.isfinite(told).all() and (told[:, 1] >= 0).all())
        if not fits:
            raise MergettaError("The bundle's members do not fit its base and basis.")
        if not all(name.isprintable() for name in self.names):
            raise MergettaError("The name of a member holds control characters.")

    def listed(self) -> list[dict[str, Any]]:
        """For people: each member's name, and how many experts and contributors it stands for."""
        counts = zip(self.names, self.experts.tolist(), self.contributors.tolist(), strict=True)
        return [{"member": name, "experts": experts, "contributors": voices} for name, experts, voices in counts]

    def tensors(self) -> dict[str, NDArray[Any]]:
        by_group = {
            f"members/{kind}/{name}": value
            for kind in ("coordinates", "further")
            for name, value in getattr(self, kind).items()
        }
        told = {f"members/{kind}": getattr(self, kind) for kind in (*COUNTS, "weights", *MOMENTS)}
        return {**by_group, **{name: value for name, value in told.items() if value is not None}}

    @classmethod
    def of_tensors(cls, names: Sequence[str], groups: Sequence[str], tensors: Mapping[str, NDArray[Any]]) -> Members:
        try:
            coordinates, further = (
                {name: tensors[f"members/{kind}/{name}"] for name in groups} for kind in ("coordinates", "further")
            )
            experts, contributors, weights = (tensors[f"members/{kind}"] for kind in (*COUNTS, "weights"))
        except KeyError as error:
            raise MergettaError(f"its members lack {error.args[0]!r}.") from error
        signatures, features = (tensors.get(f"members/{kind}") for kind in MOMENTS)
        return cls(tuple(names), coordinates, further, experts, contributors, weights, signatures, features)


@dataclass(frozen=True, eq=False)
class Bundle:
    """Base groups θ₀, bases V_r and coefficients w_r per group; the merged group is θ₀ + w_r V_r.

    Means and second moments of BatchNorm layers merge in the same way: their coefficients are those of a mixture of
    domains, and no step moves them. Of a second moment and a mean comes the merged variance.

    With members, a device may also mix those (`mixture`). The paper's bundle has none.

    >>> bundle = Bundle({"g": np.zeros(2)}, {"g": np.array([[0.0, 1.0]])}, {"g": np.array([0.5])})
    >>> bundle.dimension, bundle.merge()["g"].tolist()
    (1, [0.0, 0.5])
    """

    base: GroupValues
    """θ₀, the source model's groups."""
    basis: Mapping[str, NDArray[np.floating[Any]]]
    """(r, D) per group: orthonormal rows (the trimmed task vectors themselves if redundancy was not reduced)."""
    coefficients: Mapping[str, Vector]
    """(r,) per group: where the device starts."""
    frozen: tuple[str, ...] = ()
    """Groups that are merged with their initial coefficients and not optimised."""
    family: str = ""
    """Fingerprint of the source model."""
    variances: Variances | None = None
    """How moments vary between images and domains, in each BatchNorm layer."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How it was built: trim, rank, tolerance, number of experts."""
    members: Members | None = None
    """What it keeps of each expert, or of each cluster of similar ones."""

    def __post_init__(self) -> None:
        for name in PARTS:
            object.__setattr__(self, name, as_float32(getattr(self, name)))
        object.__setattr__(self, "frozen", tuple(self.frozen))
        if not self.base:
            raise MergettaError("A bundle needs at least one group.")
        check_groups(self.base, self.base, "The bundle's base")
        for name in ("basis", "coefficients"):
            if set(getattr(self, name)) != set(self.base):
                raise MergettaError(f"The bundle's {name} has other groups than its base.")
        for name, base in self.base.items():
            basis, coefficients = self.basis[name], self.coefficients[name]
            if base.ndim != 1 or basis.shape != (len(basis), base.size) or coefficients.shape != (len(basis),):
                raise MergettaError(
                    f"The bundle's group {name!r} does not fit together: base {base.shape}, "
                    f"basis {basis.shape}, coefficients {coefficients.shape}."
                )
            if not (np.isfinite(basis).all() and np.isfinite(coefficients).all()):
                raise MergettaError(f"The bundle holds NaN or infinite values in group {name!r}.")
        if self.variances is not None and self.variances.images.shape[1] != (len(moment_pairs(self.base)) or 1):
            raise MergettaError("The bundle's variances are of other layers than its moments.")
        if self.members is not None:
            self.members.check(self.base, self.basis)
        unknown = set(self.frozen) - set(self.base)
        if unknown:
            raise MergettaError(f"Cannot freeze {min(unknown)!r}: the model has no such group.")

    @property
    def moving(self) -> tuple[str, ...]:
        """Groups whose coefficients are optimised."""
        frozen = set(self.frozen)
        return tuple(
            name for name in learnable(self.coefficients) if name not in frozen and self.coefficients[name].size
        )

    @property
    def dimension(self) -> int:
        """How many coefficients move."""
        return sum(self.coefficients[name].size for name in self.moving)

    @cached_property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The groups that move, and how many coefficients each has: the layout of `flatten`."""
        return tuple((name, self.coefficients[name].size) for name in self.moving)

    def flatten(self, coefficients: Mapping[str, Vector] | None = None) -> Vector:
        """The coefficients that move, one after the other; by default the initial ones."""
        given = self.coefficients if coefficients is None else coefficients
        parts = [np.asarray(given[name], dtype=np.float64) for name, _ in self.sizes]
        return np.concatenate([*parts, np.empty(0)])

    def unflatten(self, vector: Vector) -> dict[str, Vector]:
        """The inverse of `flatten`: views of the vector."""
        ends = np.cumsum([size for _, size in self.sizes])
        return {name: vector[end - size : end] for (name, size), end in zip(self.sizes, ends, strict=True)}

    def merge(self, coefficients: Mapping[str, Vector] | Vector | None = None) -> dict[str, Vector]:
        """Merged groups for the given coefficients (by name, or as `flatten` lays them out).

        Groups not named keep their initial ones.
        """
        if isinstance(coefficients, np.ndarray):
            return self._packed.merge(coefficients)
        named = dict(coefficients or {})
        for name, w in named.items():
            if name not in self.base or np.shape(w) != self.coefficients[name].shape:
                raise MergettaError(f"These coefficients do not fit the bundle: group {name!r}.")
        fixed = {name: named.pop(name) for name in list(named) if name not in self.moving}
        if fixed:
            return replace(self, coefficients={**self.coefficients, **fixed}).merge(named)
        return self._packed.merge(self.flatten({**self.coefficients, **named}))

    @cached_property
    def _packed(self) -> Packed:
        return Packed(self)

    @property
    def known_members(self) -> Members:
        """The members, or one sentence where there are none."""
        if self.members is None:
            raise MergettaError("This bundle has no members: build it anew, or use the paper's method (zo-merge).")
        return self.members

    @cached_property
    def member_tasks(self) -> dict[str, NDArray[Any]]:
        """(M, D) per group: what each member adds to the base, moments as they mix."""
        members = self.known_members
        return {
            name: members.coordinates[name] @ np.vstack([self.basis[name], members.further[name]]) for name in self.base
        }

    def mixture(self, weights: Vector) -> dict[str, Vector]:
        """All groups of θ₀ + Σ w_m τ_m: one weight per member, and what is left to one for the source model.

        Moments are those of the mixture of domains.
        """
        w = np.asarray(weights, dtype=np.float32)
        shares, moving = mixture_shares(w), set(learnable(self.base))
        mixed = {
            name: base + (w if name in moving else shares) @ self.member_tasks[name]
            for name, base in as_mixed(self.base).items()
        }
        return from_mixed(mixed, self.base)

    def to_bytes(self) -> bytes:
        tensors = {f"{kind}/{name}": value for kind in PARTS for name, value in getattr(self, kind).items()}
        if self.members is not None:
            tensors |= self.members.tensors()
        if self.variances is not None:
            tensors |= {f"variances/{kind}": getattr(self.variances, kind).astype(np.float32) for kind in VARIANCES}
        header = {
            "family": self.family,
            "groups": list(self.base),
            "frozen": list(self.frozen),
            "settings": dict(self.settings),
            "members": None if self.members is None else list(self.members.names),
        }
        return encode(tensors, FORMAT, VERSION, header)

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "the bundle") -> Bundle:
        tensors, header = decode(data, FORMAT, VERSION, source, "make it anew with `mergetta build`")
        names = expect_names(header, "groups", source)
        parts: dict[str, dict[str, Any]] = {}
        for kind in PARTS:
            missing = [name for name in names if f"{kind}/{name}" not in tensors]
            if missing:
                raise MergettaError(f"{source} lacks the {kind} of group {missing[0]!r}.")
            parts[kind] = {name: tensors[f"{kind}/{name}"] for name in names}
        frozen = tuple(expect_names(header, "frozen", source))
        family = expect(header, "family", str, source)
        settings = expect(header, "settings", dict, source)
        try:
            told = [tensors[f"variances/{kind}"] for kind in VARIANCES if f"variances/{kind}" in tensors]
            variances = Variances(*told) if len(told) == len(VARIANCES) else None
            listed = header.get("members")
            if listed is not None and not (isinstance(listed, list) and all(isinstance(name, str) for name in listed)):
                raise MergettaError("its members have no valid names.")
            members = None if listed is None else Members.of_tensors(listed, names, tensors)
            return cls(**parts, frozen=frozen, family=family, variances=variances, settings=settings, members=members)
        except MergettaError as error:
            raise MergettaError(f"{source} cannot be used: {error}") from error

    @cached_property
    def digest(self) -> str:
        """What a hub knows it by."""
        return sha256(self.to_bytes()).hexdigest()

    def save(self, path: str | Path) -> None:
        write_atomically(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | Path, family: str | None = None) -> Bundle:
        """Read a bundle; with `family`, refuse one that was built for another source model."""
        bundle = cls.from_bytes(read_bytes(path), str(path))
        if family is not None and bundle.family != family:
            raise MergettaError(f"{path} belongs to the family {bundle.family!r}, but this is {family!r}.")
        return bundle


class Packed:
    """All groups of a bundle side by side, so that a merge is a few array operations instead of a few per group.

    A device merges three times per batch. Column d of `basis` belongs to one entry of one group; groups of lower rank
    are filled up with zeros.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.sizes = [base.size for base in bundle.base.values()]
        ends = np.cumsum(self.sizes)
        self.slices = [(n, slice(e - size, e)) for n, size, e in zip(bundle.base, self.sizes, ends, strict=True)]
        self.source = bundle.base
        self.base = np.concatenate(list(as_mixed(bundle.base).values()))
        rank = max(len(basis) for basis in bundle.basis.values())
        self.basis = np.zeros((rank, self.base.size), np.float32)
        self.start = np.zeros((rank, len(self.sizes)), np.float32)
        moves = np.zeros_like(self.start, dtype=bool)
        for i, (name, where) in enumerate(self.slices):
            basis = bundle.basis[name]
            self.basis[: len(basis), where] = basis
            self.start[: len(basis), i] = bundle.coefficients[name]
            moves[: len(basis), i] = name in bundle.moving
        columns, rows = np.nonzero(moves.T)  # in the order of `flatten`: group by group
        self.moves = rows, columns

    def merge(self, coefficients: Vector) -> dict[str, Vector]:
        w = self.start.copy()
        w[self.moves] = coefficients
        merged = self.base + np.einsum("rd,rd->d", np.repeat(w, self.sizes, axis=1), self.basis)
        return from_mixed({name: merged[where] for name, where in self.slices}, self.source)
