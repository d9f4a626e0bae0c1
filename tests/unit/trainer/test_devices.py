"""Layers on devices: where they go, and what cannot be placed."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_trainer.parallel.units import place
from tests.unit.trainer.worlds import run_cases, small, user


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 8))
def test_no_other_cut_has_a_smaller_largest_part(sizes, devices):
    devices = min(devices, len(sizes))
    places = place(sizes, devices)
    assert places == sorted(places)
    assert set(places) == set(range(devices))

    def largest(cuts):
        bounds = [0, *cuts, len(sizes)]
        return max(sum(sizes[a:b]) for a, b in pairwise(bounds))

    own = largest([places.index(device) for device in range(1, devices)])
    assert own == min(largest(cuts) for cuts in combinations(range(1, len(sizes)), devices - 1))


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    layout = {"devicesPerProcess": 2, "deviceMode": "Place"}
    cases = {
        "no layers": [
            {"training": small(model=user("double_tagger"), data=user("ragged_tokens")), "parallelism": layout}
        ]
    }
    return run_cases(tmp_path_factory.mktemp("refused"), 1, cases)


def test_a_model_that_does_not_say_its_layers_is_refused(refused):
    (error,) = refused["no layers"]["errors"]
    assert error.startswith("InvalidConfiguration: `parallelism.deviceMode` Place: ")
    assert "give it a method `layers`" in error
