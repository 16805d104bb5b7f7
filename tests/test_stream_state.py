"""States of a stream: what fits is taken, anything else is refused in one sentence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergetta.errors import MergettaError
from mergetta.streams.state import Field, checked


class TestFields:
    def test_types(self) -> None:
        fields = {"count": Field(low=0, whole=True), "values": Field((None, 2), -1, 1)}
        found = checked({"count": np.int32(3), "values": np.zeros((5, 2), np.float32)}, fields)
        assert found["count"].dtype == np.int64
        assert found["values"].dtype == np.float64
        assert found["values"].shape == (5, 2)
        assert checked({}, {}) == {}

    @pytest.mark.parametrize(
        ("value", "field"),
        [
            (1.5, Field(whole=True)),
            (2**63, Field(low=0, whole=True)),  # unsigned, and negative as int64
            (3.0, Field(whole=True)),
            (-1, Field(low=0)),
            (2, Field(high=1)),
            (np.nan, Field()),
            (np.zeros(2), Field()),
            (0.0, Field((None,))),
            (np.zeros((2, 3)), Field((None, 2))),
            ("1", Field()),
            (None, Field()),
            ({}, Field()),
            (1j, Field()),
        ],
    )
    def test_what_does_not_fit(self, value: object, field: Field) -> None:
        with pytest.raises(MergettaError, match=r"does not fit the adapter: 'a\.x'"):
            checked({"a.x": value}, {"x": field}, "a.")

    @settings(max_examples=200, deadline=None)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
            max_leaves=6,
        ),
        st.sampled_from([Field(), Field(whole=True), Field((None,)), Field((2,), 0, 1), Field((2, None), whole=True)]),
    )
    def test_anything_is_taken_or_refused_in_one_sentence(self, value: object, field: Field) -> None:
        try:
            array = checked({"x": value}, {"x": field})["x"]
        except MergettaError:
            return
        assert array.ndim == len(field.shape)
        assert np.isfinite(array).all()
        assert ((array >= field.low) & (array <= field.high)).all()
