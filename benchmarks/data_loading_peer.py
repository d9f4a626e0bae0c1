"""Reads microbatches with another library, in that library's own environment: the peers of data_loading.py.

    python data_loading_peer.py NAME TOKENS LENGTH FOLDER

NAME: see LIBRARIES; TOKENS: a file of uint16; FOLDER: where the library's own files are written. Prints the library's
version, or nothing where it is not installed. Then each line of the standard input names a file with the samples
[microbatches, samples of each] of an epoch, as numpy has written it, and is answered with the seconds that it took to
read that epoch.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
Epoch = Callable[[np.ndarray], Batches]
"""Yields microbatches [B, T] and their targets, int64."""


def of_datasets(folder: Path, windows: list[np.ndarray]) -> Epoch:
    """Arrow files of Hugging Face's datasets, in the order that is asked for."""
    from datasets import Dataset, Features, Sequence, Value, disable_progress_bars, load_from_disk

    disable_progress_bars()

    features = Features({"tokens": Sequence(Value("uint16"), len(windows[0]))})
    rows = [{"tokens": window} for window in windows]
    Dataset.from_list(rows, features=features).save_to_disk(folder)
    stored = load_from_disk(folder).with_format("numpy")

    def epoch(order: np.ndarray) -> Batches:
        for rows in order:
            yield cut(stored[rows.tolist()]["tokens"])

    return epoch


def of_streaming(folder: Path, windows: list[np.ndarray]) -> Epoch:
    """Shards of mosaicml-streaming on this disk, in its own order, by torch's DataLoader as its manual has it."""
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{len(windows[0])}"}) as writer:
        for window in windows:
            writer.write({"tokens": np.ascontiguousarray(window)})
    by_size: dict[int, StreamingDataset] = {}

    def epoch(order: np.ndarray) -> Batches:
        size = order.shape[1]
        if size not in by_size:
            by_size[size] = StreamingDataset(local=str(folder), shuffle=True, batch_size=size)
        loader = DataLoader(by_size[size], batch_size=size, collate_fn=together, drop_last=True)
        yield from itertools.islice(loader, len(order))

    return epoch


def together(samples: list[dict[str, np.ndarray]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The microbatch of these samples."""
    return cut(np.stack([sample["tokens"] for sample in samples]))


def cut(windows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of windows [B, T + 1]."""
    tokens = torch.from_numpy(windows.astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]


LIBRARIES = {"datasets": of_datasets, "mosaicml-streaming": of_streaming}


def main() -> None:
    name, file, length, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    try:
        print(version(name), flush=True)
    except PackageNotFoundError:
        return
    tokens = np.fromfile(file, np.uint16)
    starts = range(0, len(tokens) - length, length)
    epoch = LIBRARIES[name](folder, [tokens[start : start + length + 1] for start in starts])
    for line in sys.stdin:
        order = np.load(line.strip())
        begin = time.perf_counter()
        found = list(epoch(order))
        taken = time.perf_counter() - begin
        sizes = {tuple(part.shape) for batch in found for part in batch}
        assert (len(found), sizes) == (len(order), {(order.shape[1], length)}), (len(found), len(order), sizes)
        print(taken, flush=True)


if __name__ == "__main__":
    main()
