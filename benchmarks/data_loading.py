"""Tokens per second of a corpus's microbatches, as the trainer reads them, beside numpy's memory map of the same file:
the same ones in the same order, cut and stacked as nanoGPT does it. MB/s of text that `disttrain data prepare` turns
into shards beside the library tokenizers alone, in one process.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / name) for name in ("", "api", "trainer_image", "cli")]

from benchmarks import harness
from disttrain.corpora.prepare import prepare
from disttrain.corpora.settings import Settings
from disttrain_api.corpus import CorpusConfig
from disttrain_api.training import Training
from disttrain_trainer.data import corpus
from disttrain_trainer.data.batches import read_microbatch
from disttrain_trainer.data.sampler import Slots, permute
from disttrain_trainer.tasks.supervised import Supervised

LENGTH = 1024
BATCHES = (1, 8, 32)
TASK = Supervised(Training.model_validate({"model": {"name": "gpt"}, "data": {"name": "text"}, "steps": 1}))
FILES = sorted(REPOSITORY.glob("docs/*.md"))


def measure(quick: bool) -> Iterator[harness.Row]:
    """Both sides take turns, so that what else the machine does is borne by both."""
    repeats = 3 if quick else 9
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        source = folder / "source.txt"
        source.write_bytes(b"".join(path.read_bytes() for path in FILES) * (8 if quick else 40))
        prepare(Settings((source,), "bytes", folder / "corpus"))
        samples = corpus.load(CorpusConfig(path=str(folder / "corpus"), sequence_length=LENGTH, held_out_fraction=0.0))
        mapped = np.memmap(folder / "corpus" / "shard-000000.tokens", np.uint16, "r")
        size = len(samples.training)
        for batch in BATCHES:
            order = permute(np.arange(size // batch * batch), size, 7, 0).reshape(-1, batch)
            weights = np.ones(batch, np.float32)
            ours, bare = taking_turns(
                lambda order=order, weights=weights: [
                    read_microbatch(TASK, samples.training, Slots(rows, weights)) for rows in order
                ],
                lambda order=order: [of_map(mapped, rows) for rows in order],
                repeats,
            )
            tokens = order.size * LENGTH
            name = f"microbatches of {batch}"
            yield harness.row(name, "tokens/s", [tokens / each for each in ours], [tokens / each for each in bare])

        yield tokenizing(folder, source, repeats)


def tokenizing(folder: Path, source: Path, repeats: int) -> harness.Row:
    """MB/s of one process, with a byte-pair encoding of 1000 tokens that is trained here."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train([str(path) for path in FILES[:4]], trainers.BpeTrainer(vocab_size=1000, show_progress=False))
    tokenizer.save(str(folder / "tokenizer.json"))
    text = source.read_text()
    lines = text.splitlines(keepends=True)
    texts = ["".join(lines[at : at + 20_000]) for at in range(0, len(lines), 20_000)]
    outputs = iter(range(repeats))

    def ours() -> None:
        prepare(Settings((source,), str(folder / "tokenizer.json"), folder / f"by-{next(outputs)}"))

    own, bare = taking_turns(ours, lambda: [tokenizer.encode_batch_fast([one]) for one in texts], repeats)
    size = len(text.encode()) / 1e6
    return harness.row("prepare", "MB/s", [size / each for each in own], [size / each for each in bare])


def of_map(mapped: np.memmap, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The same microbatch from the map, cut and stacked as scripts do that read one: inputs, and targets."""
    starts = [int(row) * LENGTH for row in rows]
    inputs = [torch.from_numpy(mapped[at : at + LENGTH].astype(np.int64)) for at in starts]
    targets = [torch.from_numpy(mapped[at + 1 : at + 1 + LENGTH].astype(np.int64)) for at in starts]
    return torch.stack(inputs), torch.stack(targets)


def taking_turns(
    one: Callable[[], object], other: Callable[[], object], repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds of each."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for at, work in enumerate((one, other)):
            begin = time.perf_counter()
            work()
            taken[at].append(time.perf_counter() - begin)
    return taken


if __name__ == "__main__":
    harness.main(__doc__, measure, packages=("numpy", "torch", "tokenizers"))
