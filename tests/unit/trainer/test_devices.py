"""Layers on devices: where they go, and what cannot be placed. Copies on devices: each computes with its own."""

import threading
from contextlib import nullcontext
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from disttrain_api.compute import ActivationCheckpointing
from disttrain_trainer.parallel.activations import recompute
from disttrain_trainer.parallel.devices import Replicated
from disttrain_trainer.parallel.layers import place
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.unit.trainer.user_layers import of_layers
from tests.unit.trainer.worlds import run_cases, small, user
from tests.waiting import GENEROUS


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
        ],
        **{
            name: [{"training": small(model=of_layers(name)), "parallelism": layout}] for name in ("residual", "forked")
        },
    }
    return run_cases(tmp_path_factory.mktemp("refused"), 1, cases)


@pytest.mark.parametrize("case", ["no layers", "residual"])
def test_a_model_that_does_not_say_its_layers_is_refused(refused, case):
    (error,) = refused[case]["errors"]
    assert error.startswith("InvalidConfiguration: `parallelism.deviceMode` Place: ")
    assert "an nn.Sequential without a forward of its own, or give it a method `layers`" in error


def test_a_layer_that_returns_more_than_a_tensor_is_refused(refused):
    (error,) = refused["forked"]["errors"]
    assert error.startswith("InvalidConfiguration: `training.model`: the layer Fork returns a tuple, but what lies ")


COPIES = 3
# A module of its own for each copy; what the copies share is here.
MEETING = threading.Barrier(COPIES, timeout=GENEROUS)
USED: list[tuple[int, int]] = []


class Watched(torch.nn.Module):
    """Notes whose parameters it has, by their place among what was sent, before and after all copies have met."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.tensor(2.0))
        self.second = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, inputs):
        first = self.first
        # What is computed anew is so in the thread of the backward pass.
        if threading.current_thread() is not threading.main_thread():
            MEETING.wait()
        USED.append((first.output_nr, self.second.output_nr))
        return inputs * first * self.second


def on_three_devices(module, around=nullcontext):
    return Replicated(module, [torch.device("cpu")] * COPIES, around)


@pytest.mark.parametrize("recomputed", [False, True])
def test_copies_compute_with_their_own_parameters_also_when_computing_anew(recomputed):
    USED.clear()
    module = torch.nn.Sequential(Watched(), torch.nn.Identity())
    if recomputed:
        recompute([module[0]], ActivationCheckpointing.FULL)
    on_three_devices(module)(torch.arange(6.0)).sum().backward()
    assert sorted(USED) == sorted([(0, 0), (1, 1), (2, 2)] * (2 if recomputed else 1))
    assert module[0].first.grad == 15 * 3
    assert module[0].second.grad == 15 * 2


def test_what_a_forward_pass_is_computed_in_holds_in_the_thread_of_each_copy():
    kept = []

    def around():
        return saved_tensors_hooks(lambda tensor: kept.append(threading.get_ident()) or tensor, lambda tensor: tensor)

    module = torch.nn.Linear(4, 4)
    on_three_devices(module, around)(torch.ones(6, 4)).sum().backward()
    # Each multiplies once, with its inputs (its weights are asked for by nobody: the inputs need no gradient).
    assert len(kept) == COPIES
    assert threading.get_ident() not in kept
    assert module.weight.grad == pytest.approx(torch.full((4, 4), 6.0))


def test_a_model_that_cannot_be_copied_is_refused():
    module = torch.nn.Linear(1, 1)
    module.lock = threading.Lock()
    with pytest.raises(InvalidConfiguration, match=r"Linear cannot be copied \(cannot pickle '_thread.lock' object\)"):
        on_three_devices(module)


def test_modes_of_single_layers_and_running_means_are_those_of_the_model():
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.BatchNorm1d(1))
    module[1].eval()
    on_three_devices(module)(torch.arange(6.0)[:, None])
    # The first two samples have a mean of 0.5; momentum is 0.1.
    assert module[0].running_mean == pytest.approx(0.05)
    assert module[1].running_mean == 0.0
