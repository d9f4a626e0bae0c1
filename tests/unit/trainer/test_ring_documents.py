"""Documents on a ring: each step is cut at their ends, and together they are whole attention within documents. Ranks
that send: test_document_mask.py."""

from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional

from disttrain_trainer.parallel.context.documents import Documents
from disttrain_trainer.parallel.context.ring import Ring
from disttrain_trainer.parallel.context.ring_steps import positions, steps_of_documents, whole_steps
from tests.waiting import GENEROUS

CPU = torch.device("cpu")


def starts_of(rows):
    """Where the document of each token begins, by the lengths of the documents of each row."""
    found = []
    for lengths in rows:
        sizes = torch.tensor(lengths)
        found.append((sizes.cumsum(0) - sizes).repeat_interleave(sizes))
    return torch.stack(found)


@st.composite
def batches(draw):
    """A degree, and documents of whole sequences that it divides."""
    degree = draw(st.sampled_from([2, 3, 4]))
    length = 2 * degree * draw(st.integers(1, 4))
    cuts = st.lists(st.booleans(), min_size=length - 1, max_size=length - 1)
    rows = draw(st.lists(cuts, min_size=1, max_size=3))
    firsts = [[0, *(at for at, cut in enumerate(row, 1) if cut)] for row in rows]
    return degree, [[end - begin for begin, end in zip(row, [*row[1:], length], strict=True)] for row in firsts]


EXAMPLES = {
    "ends at the ends of pieces": (2, [[2, 2, 2, 2], [4, 4]]),
    "longer than a piece": (4, [[1, 14, 1], [3, 10, 3]]),
    "of one token": (2, [[1] * 8, [1, 6, 1]]),
    "one that is whole": (4, [[16], [5, 11]]),
    "all whole": (2, [[8], [8]]),
}


def explicit(test):
    for batch in EXAMPLES.values():
        test = example(batch)(test)
    return test


@explicit
@given(batches())
def test_each_query_looks_once_at_each_key_of_its_document_up_to_its_own(batch):
    degree, rows = batch
    starts = starts_of(rows)
    length = starts.shape[1]
    parts = [positions(rank, degree, length // degree, CPU) for rank in range(degree)]
    found = torch.zeros(len(rows), length, length, dtype=torch.int64)
    for rank, own in enumerate(parts):
        for step, looks in enumerate(steps_of_documents(rank, starts, degree)):
            visiting = parts[(rank - step) % degree]
            for look in looks:
                queries, keys = own[look.queries], visiting[look.keys]
                assert len(queries)
                assert len(keys)
                seen = torch.ones(len(queries), len(keys), dtype=torch.int64)
                found[look.rows, queries.unsqueeze(1), keys] += seen.tril() if look.causal else seen
    assert torch.equal(found, (starts.unsqueeze(2) == starts.unsqueeze(1)).long().tril())


def test_sequences_of_one_document_each_are_computed_at_once():
    assert steps_of_documents(1, starts_of([[8], [8]]), 2) == whole_steps(1, 2, 4)
    assert all(len(looks) == 1 for looks in whole_steps(1, 2, 4))


class Neighbour(Ring):
    """A rank that is a thread, with a box of messages of each kind."""

    def __init__(self, index, boxes):
        self.index, self.degree, self._boxes = index, len(boxes), boxes

    def pass_on(self, sent, tag):
        self._boxes[(self.index + 1) % self.degree][tag].put(sent.clone())
        return lambda: self._boxes[self.index][tag].get(timeout=GENEROUS)


def on_a_ring(degree, tensors, gradient, starts):
    """Attention of threads to queries, keys and values, and the gradients of these."""
    boxes = [(Queue(), Queue()) for _ in range(degree)]

    def part(index):
        documents = Documents(Neighbour(index, boxes))
        # What lies on "meta" has no values that could be looked at: those of a GPU would be waited for.
        documents.use(starts.to("meta"), starts)
        own = positions(index, degree, starts.shape[1] // degree, CPU)
        leaves = [one[:, :, own].requires_grad_() for one in tensors]
        found = documents.causal_attention(*leaves)
        # As a pipeline does, which computes another microbatch between the two passes.
        documents.use(None)
        return own, [found.detach(), *torch.autograd.grad(found, leaves, gradient[:, :, own])]

    with ThreadPoolExecutor(degree) as pool:
        found = list(pool.map(part, range(degree)))
    back = torch.cat([own for own, _ in found]).argsort()
    return [torch.cat(parts, 2)[:, :, back] for parts in zip(*(results for _, results in found), strict=True)]


@explicit
@given(batches())
def test_parts_add_up_to_whole_attention_within_documents(batch):
    degree, rows = batch
    starts = starts_of(rows)
    generator = torch.Generator().manual_seed(4)

    def drawn(heads):
        return torch.randn(len(rows), heads, starts.shape[1], 3, generator=generator, dtype=torch.float64)

    # Two heads of queries look at the same one of keys.
    tensors, gradient = [drawn(4), drawn(2), drawn(2)], drawn(4)
    leaves = [one.clone().requires_grad_() for one in tensors]
    query, key, value = leaves[0], *(one.repeat_interleave(2, 1) for one in leaves[1:])
    mask = (starts.unsqueeze(2) == starts.unsqueeze(1)).tril().unsqueeze(1)
    expected = functional.scaled_dot_product_attention(query, key, value, mask)
    gradients = torch.autograd.grad(expected, leaves, gradient)
    found = on_a_ring(degree, tensors, gradient, starts)
    for one, other in zip(found, [expected, *gradients], strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)
