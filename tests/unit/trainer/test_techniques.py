"""Techniques that change no result do something all the same: what there is to see of a step on two ranks."""

import pytest
import torch

from tests.unit.trainer.techniques_rank import MICROBATCHES
from tests.unit.trainer.worlds import how_they_ended, run_ranks

ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
PRODUCTS = {"aten.addmm.default", "aten.mm.default", ATTENTION}
CHEAP = {"aten.gelu.default", "aten.native_layer_norm.default"}
GATHER, REDUCE = "c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default"
SUM = "c10d.allreduce_.default"
RANKS = 2


def watched(folder, ranks):
    ended = run_ranks(folder, None, ranks, module="tests.unit.trainer.techniques_rank", RESULTS=str(folder))
    assert [rank.code for rank in ended] == [0] * ranks, how_they_ended(ended)
    return torch.load(folder / "results.pt", weights_only=False)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return watched(tmp_path_factory.mktemp("techniques"), RANKS)


def anew(seen, name):
    """Operators that a step runs more often than without the technique."""
    return {operator for operator, _ in seen[name]["operators"] - seen["plain"]["operators"]}


def formats(seen, name, *operators):
    return {number_format for operator, number_format in seen[name]["operators"] if operator in operators}


def test_full_recomputation_computes_layers_anew(seen):
    assert anew(seen, "recomputed") >= {"aten.addmm.default", ATTENTION} | CHEAP
    # The backward pass itself is the same.
    assert not [operator for operator in anew(seen, "recomputed") if "backward" in operator]


def test_selective_recomputation_computes_all_but_products_anew(seen):
    assert anew(seen, "recomputed selectively") >= CHEAP
    assert not anew(seen, "recomputed selectively") & PRODUCTS
    assert {operator for operator, _ in seen["plain"]["operators"]} >= PRODUCTS


def test_offloaded_activations_go_to_the_host_and_come_back(seen):
    moves = seen["activations offloaded"]["kept"]
    # Each of the layers keeps some.
    assert moves["there"] == moves["back"] > 4
    assert seen["plain"]["kept"] == {}


def test_offloaded_parameters_are_so_in_every_unit(seen):
    assert set(seen["sharded, parameters offloaded"]["policies"]) == {"CPUOffloadPolicy"}
    assert set(seen["sharded"]["policies"]) == {"OffloadPolicy"}
    assert len(seen["sharded, parameters offloaded"]["policies"]) == len(seen["sharded"]["policies"]) > 1


def test_layers_and_loss_are_compiled(seen):
    compiled = set().union(*seen["compiled"]["graphs"])
    assert compiled >= {"embedding", "scaled_dot_product_attention", "layer_norm", "linear", "cross_entropy"}
    # A layer at a time: embeddings, blocks, which are alike, head, and loss.
    assert len(seen["compiled"]["graphs"]) >= 4
    assert seen["plain"]["graphs"] == []


def test_bf16_computes_products_in_bf16_and_keeps_fp32(seen):
    found, plain = seen["BF16"], seen["plain"]
    assert formats(seen, "BF16", *PRODUCTS) == {torch.bfloat16}
    assert formats(seen, "plain", *PRODUCTS) == {torch.float32}
    assert found["parameters"] == found["gradients"] == {torch.float32}
    assert not torch.equal(found["outputs"].float(), plain["outputs"])
    torch.testing.assert_close(found["outputs"].float(), plain["outputs"], rtol=0, atol=0.05)


def test_shards_are_gathered_in_bf16_and_their_gradients_summed_in_fp32(seen):
    assert formats(seen, "sharded, BF16", GATHER, *PRODUCTS) == {torch.bfloat16}
    assert formats(seen, "sharded, BF16", REDUCE) == {torch.float32}
    assert seen["sharded, BF16"]["parameters"] == seen["sharded, BF16"]["gradients"] == {torch.float32}
    assert formats(seen, "sharded", GATHER, REDUCE) == {torch.float32}


def test_the_loss_of_every_microbatch_is_time_of_the_last_stage(seen):
    # torch computes one more, to see its shape.
    assert seen["pipeline"]["timed losses"] >= MICROBATCHES


@pytest.fixture(scope="module")
def seen_by_four(tmp_path_factory):
    return watched(tmp_path_factory.mktemp("four"), 4)


def moved_by(seen_by_four, fewer, more, *operators):
    """How often each operator runs with fewer microbatches and with more; of products more with more."""
    few, many = (seen_by_four[name]["operators"] for name in (fewer, more))
    assert many["aten.addmm.default", torch.float32] > few["aten.addmm.default", torch.float32]
    return [(few[one, torch.float32], many[one, torch.float32]) for one in operators]


def test_a_pipeline_moves_shards_once_in_a_pass_whatever_the_number_of_microbatches(seen_by_four):
    names = [f"pipeline of shards, {count} microbatches" for count in (2, 8)]
    for few, many in moved_by(seen_by_four, *names, GATHER, REDUCE):
        assert few == many > 0


def test_hybrid_shards_sum_over_replicas_once_in_a_step_and_over_shards_each_time(seen_by_four):
    names = [f"hybrid shards, {count} microbatches" for count in (1, 4)]
    over_replicas, over_shards = moved_by(seen_by_four, *names, SUM, REDUCE)
    assert over_replicas[0] == over_replicas[1] > 0
    assert over_shards[1] == 4 * over_shards[0] > 0


def test_a_static_graph_is_one_for_ddp(seen):
    assert (seen["static graph"]["static graph"], seen["plain"]["static graph"]) == (True, False)


def test_what_lies_between_shared_layers_is_cut_along_the_sequence(seen):
    """All but the logits: embeddings and blocks give [B, T, D], and each rank has its part of T."""
    whole = seen["tensor"]["sizes"][:-1]
    assert seen["tensor, sequence"]["sizes"][:-1] == [(batch, length // RANKS, width) for batch, length, width in whole]
    assert seen["tensor, sequence"]["sizes"][-1] == seen["tensor"]["sizes"][-1]


def test_logits_are_cut_along_the_vocabulary(seen):
    *whole, (batch, length, vocabulary) = seen["tensor"]["sizes"]
    assert seen["tensor, vocabulary"]["sizes"] == [*whole, (batch, length, vocabulary // RANKS)]
