"""Implementation and output of `disttrain data`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain.output import print_stderr, show, standard_error
from disttrain.terminal import console

if TYPE_CHECKING:
    from disttrain.corpora.prepare import Progress
    from disttrain.corpora.settings import Settings


def prepare_corpus(settings: Settings) -> int:
    """Turn text, JSON Lines and Parquet into a corpus of tokens. Where it was stopped, the same command goes on."""
    from disttrain.corpora.prepare import prepare

    with _progress() as shard_done:
        manifest = prepare(settings, shard_done)
    print_stderr(f"{manifest.documents} documents, {manifest.tokens} tokens below {manifest.tokenizer.vocabulary}")
    show(str(settings.output))
    return 0


def inspect_corpus(folder: Path, as_json: bool) -> int:
    """Say what a corpus holds, from its manifest and the sizes of its files."""
    from disttrain.corpora.look import inspect

    figures = asdict(inspect(folder))
    if as_json:
        show(json.dumps(figures))
    else:
        show(
            "\n".join(
                f"{name.replace('_', ' '):16} {'-' if value is None else value}" for name, value in figures.items()
            )
        )
    return 0


def verify_corpus(folder: Path) -> int:
    """Read every byte of a corpus, and compare it with the digests of its manifest."""
    from disttrain.corpora.look import verify

    manifest = verify(folder)
    show(f"{folder}: {len(manifest.shards)} shards with {manifest.tokens} tokens are as they were written")
    return 0


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """Yield the callback after each shard: it draws a bar on a terminal, and prints a line otherwise."""
    if not standard_error().isatty():
        yield lambda now: print_stderr(f"{now.shards} of {now.total_shards} shards, {now.tokens} tokens")
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.fields[tokens]} tokens"))
    with Bar(*columns, console=console(standard_error(), terminal=True)) as bar:
        task = bar.add_task("", tokens=0)
        yield lambda now: bar.update(task, completed=now.source_bytes, total=now.total_bytes, tokens=now.tokens)
