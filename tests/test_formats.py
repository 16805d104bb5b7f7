"""Files: round trips, and one clear sentence for everything that can be wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from mergetta import Bundle, Expert, MergettaError, build_bundle
from mergetta.family_file import FamilyFile
from mergetta.files import encode, write_atomically
from mergetta.models.family import load_family


def make_expert(**changes: object) -> Expert:
    values = {
        "groups": {
            "a.weight": np.arange(3.0),
            "a.bias": np.zeros(3),
            "a.running_mean": np.array([0.1, 0.2, 0.3]),
            "a.running_var": np.ones(3),
        },
        "family": "fam-1",
        "domain": "fog",
        "signature": np.ones((2, 4)),
        "features": np.ones((2, 5)),
        "provenance": {"method": "roid", "samples": 10},
    }
    return Expert(**{**values, **changes})


def make_bundle() -> Bundle:
    base = {"a.weight": np.ones(3), "a.bias": np.zeros(3), "a.running_mean": np.zeros(3), "a.running_var": np.ones(3)}
    return build_bundle(base, [make_expert()], frozen=["a.bias"])


def test_expert_round_trip(tmp_path: Path) -> None:
    expert = make_expert()
    expert.save(tmp_path / "e.safetensors")
    again = Expert.load(tmp_path / "e.safetensors", family="fam-1")
    assert (again.family, again.domain, dict(again.provenance)) == ("fam-1", "fog", dict(expert.provenance))
    assert all(np.array_equal(again.groups[name], expert.groups[name]) for name in expert.groups)
    assert np.array_equal(again.signature, expert.signature)
    assert np.array_equal(again.features, expert.features)
    assert Expert.from_bytes(make_expert(signature=None, features=None).to_bytes()).features is None
    assert again.to_bytes() == expert.to_bytes()


def test_an_expert_brings_its_source_model(tmp_path: Path) -> None:
    base = {name: np.ones(3) for name in make_expert().groups}
    source = FamilyFile("fam-1", base, ("a.bias",), "a note", {"size": 4}, (0, 1, 1, 1))
    again = Expert.from_bytes(make_expert(source=source).to_bytes())
    assert again.source is not None
    assert again.source.to_bytes() == source.to_bytes()
    assert again.source.last_blocks(1) == ("a.bias",)
    with pytest.raises(MergettaError, match="source model is 'fam-1', not 'other'"):
        make_expert(family="other", source=source)
    with pytest.raises(MergettaError, match="unknown group"):
        make_expert(source=FamilyFile("fam-1", {n: v for n, v in base.items() if n != "a.bias"}))
    for header in ({}, {"source": 3}, {"source": {}}):
        facts = {"family": "", "domain": "", "provenance": {}, **header}
        with pytest.raises(MergettaError, match="the expert"):
            Expert.from_bytes(encode({"group/a": np.zeros(1), "base/a": np.zeros(1)}, "mergetta.expert", 3, facts))


def test_bundle_round_trip(tmp_path: Path) -> None:
    bundle = make_bundle()
    bundle.save(tmp_path / "b.safetensors")
    again = Bundle.load(tmp_path / "b.safetensors", family="fam-1")
    assert again.frozen == ("a.bias",)
    assert list(again.base) == list(bundle.base)
    assert again.settings == bundle.settings
    assert all(np.array_equal(again.merge()[name], bundle.merge()[name]) for name in bundle.base)
    assert again.to_bytes() == bundle.to_bytes()


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    make_expert().save(tmp_path / "e.safetensors")
    assert set(safetensors.numpy.load_file(tmp_path / "e.safetensors")) == {
        "group/a.weight",
        "group/a.bias",
        "group/a.running_mean",
        "group/a.running_var",
        "signature",
        "features",
    }


@pytest.mark.parametrize("kind", [Expert, Bundle])
def test_truncated_at_every_length(kind: type, tmp_path: Path) -> None:
    data = (make_expert() if kind is Expert else make_bundle()).to_bytes()
    for length in range(0, len(data), 7):
        with pytest.raises(MergettaError, match=r"truncated|damaged|not a safetensors"):
            kind.from_bytes(data[:length], "cut.safetensors")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_never_raise_anything_else(data: st.DataObject) -> None:
    raw = bytearray(make_expert().to_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        Expert.from_bytes(bytes(raw))
    except MergettaError as error:
        assert str(error)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(MergettaError):
        Bundle.from_bytes(raw)


def test_version_from_the_future() -> None:
    data = encode({"group/a": np.zeros(1)}, "mergetta.expert", 99, {"family": "", "domain": "", "provenance": {}})
    with pytest.raises(MergettaError, match="upgrade mergetta"):
        Expert.from_bytes(data)


@pytest.mark.parametrize(
    ("read", "format", "sentence"),
    [
        (Expert.from_bytes, "mergetta.expert", "older than this mergetta reads .*`mergetta adapt`"),
        (Bundle.from_bytes, "mergetta.bundle", "older than this mergetta reads .*`mergetta build`"),
    ],
)
def test_an_older_version_says_how_to_make_the_file_anew(read: Callable, format: str, sentence: str) -> None:
    """Refused for its version alone, whatever it holds."""
    with pytest.raises(MergettaError, match=sentence):
        read(encode({"statistics": np.zeros(1)}, format, 1, {"family": "", "domain": "", "provenance": {}}))


def test_an_older_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(encode({"w": np.zeros(1)}, "mergetta.checkpoint", 1, {"name": "x"}))
    with pytest.raises(MergettaError, match=r"version 1, older than this mergetta reads \(2\): \w+"):
        load_family(tmp_path / "c")


@pytest.mark.parametrize("version", [0, -1, True, "2", None, 1.5])
def test_a_version_that_is_none(version: object) -> None:
    data = encode({"group/a": np.zeros(1)}, "mergetta.expert", version, {})  # type: ignore[arg-type]
    with pytest.raises(MergettaError, match="no valid format version"):
        Expert.from_bytes(data)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"a.running_var": -np.ones(3)}, "negative variances in group 'a.running_var'"),
        ({"a.running_var": None}, "belong together"),
        ({"a.running_mean": None}, "belong together"),
        ({"b.running_mean": np.zeros(2)}, "belong together"),
        ({"a.running_var": np.ones(2)}, "a.running_var|size|shape"),
    ],
)
def test_moments_that_cannot_be(changes: dict, sentence: str) -> None:
    """A mean without its variance, or one of another size, would be found only where it is merged."""
    groups = {n: v for n, v in {**make_expert().groups, **changes}.items() if v is not None}
    with pytest.raises(MergettaError, match=sentence):
        make_expert(groups=groups)
    data = encode(
        {f"group/{n}": np.asarray(v, np.float32) for n, v in groups.items()},
        "mergetta.expert",
        3,
        {"family": "", "domain": "", "provenance": {}},
    )
    with pytest.raises(MergettaError, match=f"the expert cannot be used: .*({sentence})"):
        Expert.from_bytes(data)
    nothing = {n: np.zeros((0, len(v))) for n, v in groups.items()}
    with pytest.raises(MergettaError, match=sentence):
        Bundle(groups, nothing, {n: np.zeros(0) for n in groups})


def test_parts_that_no_expert_has() -> None:
    header = {"family": "", "domain": "", "provenance": {}}
    data = encode({"group/a": np.zeros(1, np.float32), "moments": np.zeros((2, 1))}, "mergetta.expert", 3, header)
    with pytest.raises(MergettaError, match="'moments', which is no part of an expert"):
        Expert.from_bytes(data)


def test_wrong_kind_of_file() -> None:
    with pytest.raises(MergettaError, match=r"is a 'mergetta.bundle' file, but a 'mergetta.expert'"):
        Expert.from_bytes(make_bundle().to_bytes())


def test_foreign_safetensors() -> None:
    with pytest.raises(MergettaError, match="not one written by mergetta"):
        Expert.from_bytes(safetensors.numpy.save({"x": np.zeros(2)}))


def test_wrong_family(tmp_path: Path) -> None:
    make_expert().save(tmp_path / "e")
    make_bundle().save(tmp_path / "b")
    for load, name in ((Expert.load, "e"), (Bundle.load, "b")):
        with pytest.raises(MergettaError, match="belongs to the family 'fam-1'"):
            load(tmp_path / name, family="fam-2")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MergettaError, match="No such file"):
        Expert.load(tmp_path / "nothing")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite(value: float) -> None:
    with pytest.raises(MergettaError, match="NaN or infinite"):
        make_expert(groups={"a": np.array([1.0, value])})
    data = encode(
        {"group/a": np.array([value], np.float32)}, "mergetta.expert", 3, {"family": "", "domain": "", "provenance": {}}
    )
    with pytest.raises(MergettaError, match="NaN or infinite"):
        Expert.from_bytes(data)
    with pytest.raises(MergettaError, match="NaN or infinite"):
        Bundle({"a": np.zeros(1)}, {"a": np.full((1, 1), value)}, {"a": np.zeros(1)})


def test_empty_or_misshapen_experts() -> None:
    with pytest.raises(MergettaError, match="at least one group"):
        make_expert(groups={})
    with pytest.raises(MergettaError, match="a vector is needed"):
        make_expert(groups={"a": np.zeros((2, 2))})
    with pytest.raises(MergettaError, match=r"shape \(2, channels\)"):
        make_expert(signature=np.zeros(3))
    with pytest.raises(MergettaError, match="variances that are not negative"):
        make_expert(signature=-np.ones((2, 3)))
    with pytest.raises(MergettaError, match=r"features must have shape \(2, channels\)"):
        make_expert(features=np.zeros((3, 2)))
    with pytest.raises(MergettaError, match="features must be finite"):
        make_expert(features=np.full((2, 2), np.inf))


def test_bundles_that_do_not_fit_together() -> None:
    with pytest.raises(MergettaError, match="other groups"):
        Bundle({"a": np.zeros(2)}, {}, {})
    with pytest.raises(MergettaError, match="does not fit together"):
        Bundle({"a": np.zeros(2)}, {"a": np.zeros((1, 3))}, {"a": np.zeros(1)})
    with pytest.raises(MergettaError, match="no such group"):
        Bundle({"a": np.zeros(2)}, {"a": np.zeros((1, 2))}, {"a": np.zeros(1)}, frozen=("b",))


@pytest.mark.parametrize("name", ["fog\x1b]0;title\x07", "fog\nsnow", "fog\u202e"])
def test_names_that_a_terminal_would_obey(name: str) -> None:
    base = {"a": np.zeros(2, np.float32)}
    with pytest.raises(MergettaError, match="holds control characters"):
        build_bundle(base, [Expert({"a": np.ones(2, np.float32)}, "", name)])


def test_header_without_what_it_needs() -> None:
    data = encode({"group/a": np.zeros(1, np.float32)}, "mergetta.expert", 3, {"family": 3})
    with pytest.raises(MergettaError, match="no valid 'family'"):
        Expert.from_bytes(data)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(MergettaError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    family = load_family("fashion-bn")
    family.save(tmp_path / "copy.safetensors")
    again = load_family(tmp_path / "copy.safetensors")
    assert again.fingerprint == family.fingerprint
    assert again.preprocessing == family.preprocessing
    assert again.classes == family.classes


def test_checkpoint_that_does_not_fit_its_architecture(tmp_path: Path) -> None:
    header = {"name": "x", "architecture": "small-resnet", "options": {}, "mean": [0.0], "std": [1.0], "classes": ["a"]}
    path = tmp_path / "c.safetensors"
    path.write_bytes(encode({"conv.weight": np.zeros(1)}, "mergetta.checkpoint", 2, header))
    with pytest.raises(MergettaError, match="does not fit its architecture"):
        load_family(path)
    path.write_bytes(encode({}, "mergetta.checkpoint", 2, {**header, "architecture": "alexnet"}))
    with pytest.raises(MergettaError, match="does not have"):
        load_family(path)
    with pytest.raises(MergettaError, match="embedded: fashion-bn, fashion-vit"):
        load_family("none")


HEADERS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["family", "groups", "frozen", "settings", "version"]), HEADERS)
def test_strange_bundle_headers_are_refused_or_harmless(key: str, value: object) -> None:
    bundle = make_bundle()
    header = {"family": "f", "groups": list(bundle.base), "frozen": [], "settings": {}, key: value}
    tensors = {f"{k}/{n}": v for k in ("base", "basis", "coefficients") for n, v in getattr(bundle, k).items()}
    version = header.pop("version", 2)
    try:
        Bundle.from_bytes(encode(tensors, "mergetta.bundle", version, header)).to_bytes()
    except MergettaError as error:
        assert str(error)


@pytest.mark.parametrize(
    "changes",
    [{"std": ["a"]}, {"std": [0.0]}, {"mean": [0.1, 0.2]}, {"classes": ["a"]}, {"classes": [1]}, {"size": "x"},
     {"signature": [1.0]}, {"signature": "x"}, {"options": {"widths": []}}, {"options": {"depth": "x"}}],
)  # fmt: skip
def test_strange_checkpoint_headers(changes: dict, tmp_path: Path) -> None:
    family = load_family("fashion-bn")
    header = {
        "name": "x", "architecture": "small-resnet", "options": {}, "mean": [0.3], "std": [0.3], "size": 28,
        "classes": list(family.classes), **changes,
    }  # fmt: skip
    tensors = {name: value.numpy() for name, value in family.model.state_dict().items()}
    (tmp_path / "c").write_bytes(encode(tensors, "mergetta.checkpoint", 2, header))
    with pytest.raises(MergettaError):
        load_family(tmp_path / "c")


def test_header_that_is_not_json() -> None:
    with pytest.raises(MergettaError, match="cannot be written as JSON"):
        make_expert(provenance={"lr": float("nan")}).to_bytes()
    data = make_expert(provenance={"lr": 123.0}).to_bytes().replace(b"123.0", b"  NaN")
    with pytest.raises(MergettaError, match="damaged"):
        Expert.from_bytes(data)


def test_errors_name_the_file(tmp_path: Path) -> None:
    tensors = {"group/a": np.zeros((2, 2), np.float32)}
    (tmp_path / "bad").write_bytes(
        encode(tensors, "mergetta.expert", 3, {"family": "", "domain": "", "provenance": {}})
    )
    with pytest.raises(MergettaError, match=r"bad cannot be used: .* a vector is needed"):
        Expert.load(tmp_path / "bad")
    with pytest.raises(MergettaError, match="it is a folder"):
        write_atomically(tmp_path, b"")


def test_header_is_json(tmp_path: Path) -> None:
    data = make_expert().to_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["mergetta"])
    assert header["format"] == "mergetta.expert"
    assert header["version"] == 3
