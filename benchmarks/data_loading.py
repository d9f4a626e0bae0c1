"""Tokens per second of a corpus's microbatches, as the trainer reads them, beside numpy's memory map of the same file:
the same ones in the same order, cut and stacked as nanoGPT does it. And beside two libraries with the same tokens in
their own files: Hugging Face's datasets, asked for the same samples, and mosaicml-streaming, which shuffles by itself.
MB/s of text that `disttrain data prepare` turns into shards beside the library tokenizers alone: in one process, and
with all cores, where the library gets batches for its own threads.

The two libraries are no dependencies of this project, and do not go with its versions of others. PEERS names a virtual
environment that has them, which may be made so; what it lacks is left out, by name:

    python3 -m venv peers
    peers/bin/pip install mosaicml-streaming datasets
    PEERS=$PWD/peers .venv/bin/python benchmarks/data_loading.py
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / name) for name in ("", "api", "trainer_image", "cli")]

from benchmarks import harness
from disttrain.corpora.prepare import prepare
from disttrain.corpora.settings import Settings
from disttrain_api.batch import Batch
from disttrain_api.corpus import CorpusConfig
from disttrain_api.training import Training
from disttrain_trainer.data import corpus
from disttrain_trainer.data.ahead import ahead_of
from disttrain_trainer.data.batches import load_microbatches
from disttrain_trainer.data.corpus import TokenSequences
from disttrain_trainer.data.sampler import Cursor, Sampler, permute
from disttrain_trainer.tasks.supervised import Supervised

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CPU = torch.device("cpu")
LENGTH, SEED = 1024, 7
STEPS = ((1, 1), (8, 1), (1, 8), (1, 32))
"""Microbatches of a step, and sequences of each."""
TASK = Supervised(Training.model_validate({"model": {"name": "gpt"}, "data": {"name": "text"}, "steps": 1}))
LIBRARIES = ("datasets", "mosaicml-streaming")
FILES = sorted(REPOSITORY.glob("docs/*.md"))
PREPARE = """
import sys
from pathlib import Path
from disttrain.corpora.prepare import prepare
from disttrain.corpora.settings import Settings
source, tokenizer, output, workers = sys.argv[1:]
# So large that a shard has work for all.
prepare(Settings((Path(source),), tokenizer, Path(output), workers=int(workers), segment_bytes=2**22))
"""


def measure(quick: bool, only: str | None = None) -> Iterator[harness.Row]:
    """Both sides take turns, so that what else the machine does is borne by both."""
    repeats = 3 if quick else 9
    for part in PARTS if only is None else (only,):
        yield from PARTS[part](quick, repeats)


def loading(quick: bool, repeats: int) -> Iterator[harness.Row]:
    """Microbatches of a corpus."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        source = text_in(folder, quick)
        prepare(Settings((source,), "bytes", folder / "corpus"))
        samples = corpus.load(CorpusConfig(path=str(folder / "corpus"), sequence_length=LENGTH, held_out_fraction=0.0))
        mapped = np.memmap(folder / "corpus" / "shard-000000.tokens", np.uint16, "r")
        yield from beside("microbatches of", samples.training, seconds_of(partial(of_map, mapped)), repeats)
        for library in LIBRARIES:
            with peer(library, folder) as seconds:
                if seconds is not None:
                    yield from beside(f"beside {library}:", samples.training, seconds, repeats)


def preparing(quick: bool, repeats: int) -> Iterator[harness.Row]:
    """Text to shards."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        source = text_in(folder, quick)
        yield tokenizing(folder, source, repeats)
        yield from tokenizing_together(folder, source, repeats)


PARTS = {"loading": loading, "prepare": preparing}


def text_in(folder: Path, quick: bool) -> Path:
    """A file with text in the folder."""
    source = folder / "source.txt"
    source.write_bytes(b"".join(path.read_bytes() for path in FILES) * (8 if quick else 40))
    return source


Epoch = Callable[[np.ndarray], Iterator[tuple[torch.Tensor, torch.Tensor]]]
"""Yields the microbatches of an epoch, inputs and targets, of samples [steps, microbatches, samples of each]."""


Seconds = Callable[[np.ndarray], float]
"""Reads an epoch and returns how long that took."""


def beside(name: str, training: TokenSequences, other: Seconds, repeats: int) -> Iterator[harness.Row]:
    """Whole epochs, by the size of a microbatch and how many a step has."""
    size, own = len(training), seconds_of(partial(ours, training))
    for passes, batch in STEPS:
        step = passes * batch
        order = permute(np.arange(size // step * step), size, SEED, 0).reshape(-1, passes, batch)
        taken = [(own(order), other(order)) for _ in range(repeats)]
        values, references = ([order.size * LENGTH / each for each in side] for side in zip(*taken, strict=True))
        steps = f", {passes} in a step" if passes > 1 else ""
        yield harness.row(f"{name} {batch}{steps}", "tokens/s", values, references)


def seconds_of(epoch: Epoch) -> Seconds:
    """What reads these microbatches here."""

    def seconds(order: np.ndarray) -> float:
        begin = time.perf_counter()
        found = list(epoch(order))
        taken = time.perf_counter() - begin
        sizes = {tuple(part.shape) for batch in found for part in batch}
        steps, passes, batch = order.shape
        assert (len(found), sizes) == (steps * passes, {(batch, LENGTH)}), (len(found), order.shape, sizes)
        return taken

    return seconds


@contextmanager
def peer(library: str, folder: Path) -> Iterator[Seconds | None]:
    """What reads the same tokens with a library; None where it is not installed, which is printed."""
    python = Path(os.environ.get("PEERS", "/nonexistent")) / "bin" / "python"
    script = Path(__file__).with_name("data_loading_peer.py")
    tokens = folder / "corpus" / "shard-000000.tokens"
    command = [str(python), str(script), library, str(tokens), str(LENGTH), str(folder / library)]
    if not python.exists():
        print(f"left out: beside {library}: PEERS must name a virtual environment that has it (--help)", flush=True)
        yield None
        return
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        found = process.stdout.readline().strip()
        print(
            f"{library} {found}" if found else f"left out: beside {library}: {python} has it not (--help)", flush=True
        )

        def seconds(order: np.ndarray) -> float:
            np.save(folder / "order.npy", order.reshape(-1, order.shape[-1]))
            print(folder / "order.npy", file=process.stdin, flush=True)
            return float(process.stdout.readline())

        yield seconds if found else None
        process.stdin.close()


def ours(training: TokenSequences, order: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The trainer's, as it reads the steps of a job on a CPU: its sampler has the same order."""
    _, passes, micro = order.shape
    batch = Batch(micro, accumulation=passes, world=passes * micro)
    sampler, cursor = Sampler(len(training), SEED, batch, replicas=1, draws=False), Cursor()
    assert (sampler.microbatches(cursor, 0)[0].indices == order[0, 0]).all()
    ahead = ahead_of(TASK, training, sampler, 0)
    for _ in order:
        if ahead is not None:
            found = ahead.load(cursor, CPU)
        else:
            found = load_microbatches(TASK, training, sampler.microbatches(cursor, 0), CPU)
        yield from ((microbatch.inputs, microbatch.targets) for microbatch in found)
        cursor = sampler.advance(cursor)


def tokenizing(folder: Path, source: Path, repeats: int) -> harness.Row:
    """MB/s of one process, with a byte-pair encoding of 1000 tokens that is trained here."""
    tokenizer = trained(folder / "tokenizer.json")
    text = source.read_text()
    lines = text.splitlines(keepends=True)
    texts = ["".join(lines[at : at + 20_000]) for at in range(0, len(lines), 20_000)]
    outputs = iter(range(repeats))

    def ours() -> None:
        prepare(Settings((source,), str(folder / "tokenizer.json"), folder / f"by-{next(outputs)}"))

    own, bare = taking_turns(ours, lambda: [tokenizer.encode_batch_fast([one]) for one in texts], repeats)
    size = len(text.encode()) / 1e6
    return harness.row("prepare", "MB/s", [size / each for each in own], [size / each for each in bare])


def tokenizing_together(folder: Path, source: Path, repeats: int) -> Iterator[harness.Row]:
    """MB/s with all cores: one text, and JSON Lines. Beside it the library, which reads the same documents, encodes
    batches of them with threads of its own, and writes the tokens into one file."""
    tokenizer, cores = trained(folder / "tokenizer.json"), len(os.sched_getaffinity(0))
    paragraphs = source.read_text().split("\n\n")
    lines = folder / "source.jsonl"
    lines.write_text("".join(json.dumps({"text": one}) + "\n" for one in paragraphs))
    text = source.read_text().splitlines(keepends=True)
    sources: dict[Path, Callable[[], Iterator[str]]] = {
        source: lambda: ("".join(text[at : at + 2_000]) for at in range(0, len(text), 2_000)),
        lines: lambda: (json.loads(line)["text"] for line in lines.open()),
    }
    for path, documents in sources.items():
        outputs = iter(range(repeats))

        def ours(path: Path = path, outputs: Iterator[int] = outputs) -> None:
            output = folder / f"{path.suffix[1:]}-{next(outputs)}"
            # A program of its own: its processes import what they need, and not what this script has.
            command = [sys.executable, "-c", PREPARE, path, folder / "tokenizer.json", output, str(cores)]
            subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path[:4])})

        def bare(documents: Callable[[], Iterator[str]] = documents) -> None:
            with (folder / "bare.tokens").open("wb") as file:
                for batch in batched(documents(), 1_000):
                    for found in tokenizer.encode_batch_fast(batch):
                        file.write(np.array(found.ids, np.uint16).tobytes())

        own, other = taking_turns(ours, bare, repeats)
        size = path.stat().st_size / 1e6
        yield harness.row(
            f"prepare {path.suffix}, {cores} processes",
            "MB/s",
            [size / each for each in own],
            [size / each for each in other],
        )


def batched(documents: Iterator[str], most: int) -> Iterator[list[str]]:
    """Yield the documents in lists."""
    while batch := list(islice(documents, most)):
        yield batch


def trained(path: Path) -> "Tokenizer":
    """Return a byte-pair encoding of 1000 tokens, which is written to `path`, too."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train([str(one) for one in FILES[:4]], trainers.BpeTrainer(vocab_size=1000, show_progress=False))
    tokenizer.save(str(path))
    return tokenizer


def of_map(mapped: np.memmap, order: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same microbatches from the map, cut and stacked as scripts do that read one."""
    for rows in order.reshape(-1, order.shape[-1]):
        starts = [int(row) * LENGTH for row in rows]
        inputs = [torch.from_numpy(mapped[at : at + LENGTH].astype(np.int64)) for at in starts]
        targets = [torch.from_numpy(mapped[at + 1 : at + 1 + LENGTH].astype(np.int64)) for at in starts]
        yield torch.stack(inputs), torch.stack(targets)


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
    harness.main(__doc__, measure, packages=("numpy", "torch", "tokenizers"), parts=PARTS)
