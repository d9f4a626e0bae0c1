"""Which samples a step computes: the same ones in any number of ranks and readers, and after stops and resizes."""

from collections import Counter
from itertools import accumulate, pairwise

import pytest

from disttrain_api.chat import ChatConfig
from disttrain_trainer.data import chat
from tests.chats import CHATML, conversations, write_chats, write_tokenizer
from tests.unit.trainer.layouts import SHARD, TENSOR
from tests.unit.trainer.sample_ids_rank import global_batches
from tests.unit.trainer.test_indexed import write_indexed
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

LENGTH, BATCH, STEPS = 8, 8, 20
STOPS = (7, 13)
# Samples in each corpus. A token is the number of its corpus times APART, plus its place in the corpus.
SIZES = (5, 9, 17)
APART = 1000
WEIGHTS = (1.0, 2.0, 1.0)
# In an epoch no corpus is more than one sample ahead of another.
COUNTS = {
    # A quarter of an epoch in which the last one is read once.
    "weights, packed": (17, 34, 17),
    # The roots of 41, 73 and 137 tokens are to one another as these.
    "temperature": (9, 12, 17),
}
DATA = [*COUNTS, "packed conversations"]
# ranks, readers, parallelism, samples of a microbatch
RUNS = {
    "one rank": (1, 0, {}, 8),
    "two ranks": (2, 0, {}, 4),
    "two ranks, readers, accumulated": (2, 2, {}, 2),
    "four ranks, readers": (4, 2, {}, 2),
    "four ranks, of which two share layers, accumulated": (4, 0, {SHARD: 2, TENSOR: 2}, 2),
}
# Ranks and readers from one stop to the next.
RESIZED = {"two, four, one": ((2, 2), (4, 0), (1, 2))}


def token_of(corpus, place):
    return corpus * APART + place


def cuts_of(corpus):
    """Where the sequences of a corpus begin, and where the last one ends."""
    end = SIZES[corpus] * LENGTH + 1
    return [0, *range(3, end, 5 + corpus), end]


def corpora(folder):
    """Documents of one or two sequences."""
    for corpus, size in enumerate(SIZES):
        tokens = [token_of(corpus, place) for place in range(size * LENGTH + 1)]
        cuts = cuts_of(corpus)
        sequences = [tokens[begin:end] for begin, end in pairwise(cuts)]
        ends = [end for end in range(1, len(sequences) + 1) if end % 3 or end == len(sequences)]
        yield str(write_indexed(folder / str(corpus), older=bool(corpus % 2), tokens=sequences, ends=ends))


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """The data of a job, by name."""
    folder = tmp_path_factory.mktemp("data")
    paths = list(corpora(folder))
    common = {"sequenceLength": LENGTH, "vocabularySize": len(SIZES) * APART, "heldOutFraction": 0}
    weighted = [{"path": path, "weight": weight} for path, weight in zip(paths, WEIGHTS, strict=True)]
    found = {
        "weights, packed": {"mixture": weighted, "documentMask": True},
        "temperature": {"mixture": [{"path": path} for path in paths], "temperature": 2.0},
    }
    data = {name: {"name": "corpus", "config": common | config} for name, config in found.items()}
    write_chats(folder / "chats.jsonl", conversations(60))
    tokenizer = str(write_tokenizer(folder / "chatml", CHATML))
    chats = {"path": str(folder / "chats.jsonl"), "tokenizer": tokenizer, "heldOutFraction": 0, "packing": True}
    return data | {"packed conversations": {"name": "chat", "config": chats | {"sequenceLength": 96}}}


def run_of(data, workers, parallelism, micro, **changes):
    shape = {"layers": 1, "heads": 2, "width": 8, "vocabularySize": len(SIZES) * APART}
    training = {
        "model": {"name": "gpt", "config": shape},
        "data": data,
        "steps": STEPS,
        "globalBatchSize": BATCH,
        "microBatchSize": micro,
        "dataWorkers": workers,
        "seed": 5,
    }
    return {"training": training, "parallelism": parallelism, **changes}


@pytest.fixture(scope="module")
def found(described, tmp_path_factory, asked_for):
    """By run and data the samples of each step."""
    folder, batches = tmp_path_factory.mktemp("ids"), {}
    asked = {"one rank"} | asked_for("test_sample_ids", "run")
    for world in (1, 2, 4):
        cases = {
            f"{name}; {kind}": [run_of(data, workers, parallelism, micro)]
            for name, (ranks, workers, parallelism, micro) in RUNS.items()
            for kind, data in described.items()
            if ranks == world and name in asked
        }
        if cases:
            require_ended(run_cases(folder / "whole", world, cases, module="tests.unit.trainer.sample_ids_rank"))
        batches |= {case: list(global_batches(folder / "whole" / case)) for case in cases}
    for name, parts in RESIZED.items():
        if name not in asked:
            continue
        for (ranks, workers), stop in zip(parts, (*STOPS, None), strict=True):
            changes = (
                {} if stop is None else {"stop_after": stop - max((one for one in STOPS if one < stop), default=0)}
            )
            cases = {
                f"{name}; {kind}": [run_of(data, workers, {}, BATCH // ranks, **changes)]
                for kind, data in described.items()
            }
            results = run_cases(folder / "resized", ranks, cases, module="tests.unit.trainer.sample_ids_rank")
            if stop is None:
                require_ended(results)
        batches |= {case: list(global_batches(folder / "resized" / case)) for case in cases}
    return batches


def require_ended(results):
    assert {case: result["errors"] for case, result in results.items()} == {case: [None] for case in results}


def epochs(batches, size):
    """The samples of each epoch, of which the last one may not be whole."""
    per_epoch = -(-size // BATCH)
    return [samples_of(batches[at : at + per_epoch]) for at in range(0, len(batches), per_epoch)]


def samples_of(batches):
    return [sample for batch in batches for sample in batch]


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("run", [*list(RUNS)[1:], *RESIZED])
def test_a_step_has_the_samples_that_it_has_with_one_rank(found, run, kind):
    assert len(found[f"{run}; {kind}"]) == STEPS
    assert found[f"{run}; {kind}"] == found[f"one rank; {kind}"]


@pytest.mark.parametrize("kind", COUNTS)
def test_an_epoch_has_each_corpus_in_its_share_and_whole(found, kind):
    counts = COUNTS[kind]
    whole = epochs(found[f"one rank; {kind}"], sum(counts))
    assert len(whole) > 2
    assert all(stop % -(-sum(counts) // BATCH) for stop in STOPS)
    orders = []
    for epoch in whole[:2]:
        ids = []
        for inputs, starts in epoch:
            corpus, place = divmod(inputs[0], APART)
            assert inputs == [token_of(corpus, place + at) for at in range(LENGTH)]
            assert place % LENGTH == 0
            assert (starts is not None) == ("packed" in kind)
            ids.append((corpus, place // LENGTH))
        times = Counter(ids)
        for corpus, (count, size) in enumerate(zip(counts, SIZES, strict=True)):
            assert [times[corpus, at] for at in range(size)] == [
                count // size + (at < count % size) for at in range(size)
            ]
        assert sum(times.values()) == sum(counts)
        orders.append(ids)
    assert orders[0] != orders[1]


def test_packed_documents_are_those_of_the_corpus(found):
    """Red where a sample comes with the documents of another one."""
    several = 0
    for inputs, starts in samples_of(found["one rank; weights, packed"]):
        corpus, place = divmod(inputs[0], APART)
        # Sequences on both sides of every third cut are one document.
        first = {cut - place for number, cut in enumerate(cuts_of(corpus)) if number % 3}
        assert starts == list(accumulate((at if at in first else 0 for at in range(LENGTH)), max))
        several += len(set(starts)) > 1
    assert several > 20


def test_an_epoch_has_each_pack_of_conversations_once(described, found):
    config = described["packed conversations"]["config"]
    data = chat.load(ChatConfig.model_validate(config)).training
    wanted = Counter(tuple(sample.inputs.tolist()) for sample in data)
    first, second, *_ = epochs(found["one rank; packed conversations"], len(data))
    assert first != second
    for epoch in (first, second):
        assert Counter(tuple(inputs) for inputs, _ in epoch) == wanted
    assert all(stop % -(-len(data) // BATCH) for stop in STOPS)
