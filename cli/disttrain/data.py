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
    from disttrain.corpora.run import Progress
    from disttrain.corpora.settings import Settings


def prepare_corpus(settings: Settings) -> int:
    """Turn text, JSON Lines and Parquet into a corpus of tokens. Where it was stopped, the same command goes on."""
    from disttrain.corpora.prepare import prepare

    with _progress() as on_progress:
        manifest = prepare(settings, on_progress)
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
    """Yield the callback for what was read: it draws a bar on a terminal, and prints a line per percent otherwise."""
    if not standard_error().isatty():
        yield _lines()
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.fields[made]}"))
    with Bar(*columns, console=console(standard_error(), terminal=True)) as bar:
        task = bar.add_task("", made="")
        yield lambda now: bar.update(task, completed=now.source_bytes, total=now.total_bytes, made=_made(now))


def _lines() -> Callable[[Progress], None]:
    shown: tuple[int, bool] | None = None

    def line(now: Progress) -> None:
        nonlocal shown
        percent = 100 * now.source_bytes // max(1, now.total_bytes)
        if (percent, now.shards == now.total_shards) != shown:
            shown = percent, now.shards == now.total_shards
            print_stderr(f"{percent} % of {now.total_bytes / 1e6:.1f} MB read, {_made(now)}")

    return line


def _made(now: Progress) -> str:
    return f"{now.tokens} tokens, {now.shards} of {now.total_shards} shards"
