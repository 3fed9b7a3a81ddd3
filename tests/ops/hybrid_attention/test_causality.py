"""A prefix never changes when tokens are appended or later tokens change."""

from __future__ import annotations

import hybrid_wrong
import pytest
from hybrid_cases import IMPLEMENTATIONS, SPECS, make_case
from hybrid_checks import check_prefix

PREFIXES = [1, 2, 30, 63, 64, 65, 128, 149]


@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("backend", list(IMPLEMENTATIONS))
def test_prefix_is_stable(backend: str, name: str) -> None:
    check_prefix(IMPLEMENTATIONS[backend], make_case(SPECS[name], 150, batch=1, repeats=3), PREFIXES)


def test_catches_blocks_counted_from_the_end() -> None:
    case = make_case(SPECS["terraced-4"], 20)
    check_prefix(hybrid_wrong.blocks_from_the_end, case, [8, 16])  # whole blocks
    with pytest.raises(AssertionError, match="prefix of 15, tokens appended"):
        check_prefix(hybrid_wrong.blocks_from_the_end, case, [15])


def test_catches_a_look_into_the_future() -> None:
    def reversed_time(q, k, v, spec, params, **options):
        y, state = IMPLEMENTATIONS["chunked"](q.flip(2), k.flip(2), v.flip(2), spec, params, **options)
        return y.flip(2), state

    with pytest.raises(AssertionError, match="prefix of 15"):
        check_prefix(reversed_time, make_case(SPECS["terraced-4"], 20), [15])
