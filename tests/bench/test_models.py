"""Shapes of the benchmarked models."""

from __future__ import annotations

import pytest

from lolcats.bench.models import SHAPES, check_shape, weight_gib
from lolcats.errors import UserError


def test_shapes_have_their_size():
    """Parameters as published: 8.03 and 0.1345 billion."""
    gib = {name: weight_gib(name, "bfloat16") for name in SHAPES}
    assert gib["llama3-8b"] * 2**30 / 2 == pytest.approx(8.03e9, rel=1e-3)
    assert gib["smollm2-135m"] * 2**30 / 2 == pytest.approx(134.5e6, rel=1e-3)


def test_an_unknown_shape_is_refused():
    with pytest.raises(UserError, match="huge"):
        check_shape("huge")
