"""`disttrain data prepare | inspect | verify`: corpora of tokens."""

import os
from pathlib import Path
from typing import Annotated

import typer

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_MOST = 2**20

data = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
    subcommand_metavar="COMMAND …",
    help="Prepare, inspect and verify corpora of tokens.",
)


@data.command(context_settings=_SETTINGS)
def prepare(
    sources: Annotated[
        list[Path], typer.Argument(metavar="SOURCE…", help="files or folders: text, .jsonl, .parquet, .gz")
    ],
    tokenizer: Annotated[
        str,
        typer.Option("--tokenizer", metavar="FILE", help="a tokenizer.json, SentencePiece's .model, or `bytes`"),
    ],
    output: Annotated[Path, typer.Option("--output", metavar="FOLDER", help="folder to create")],
    field: Annotated[str, typer.Option("--field", help="field of a JSON line, or column, with the text")] = "text",
    pattern: Annotated[str, typer.Option("--pattern", help="files of a folder to read")] = "*",
    end_of_document: Annotated[
        str | None,
        typer.Option("--end-of-document", metavar="TOKEN", help="token after each document, as text or number"),
    ] = None,
    begin_of_document: Annotated[
        str | None,
        typer.Option("--begin-of-document", metavar="TOKEN", help="token before each document, likewise"),
    ] = None,
    special_tokens: Annotated[
        str,
        typer.Option(
            "--special-tokens",
            metavar="refuse|encode|text",
            help="text that spells a special token: an error, the token, or text",
        ),
    ] = "refuse",
    shard_size: Annotated[
        int, typer.Option("--shard-size", metavar="MIB", min=1, max=_MOST, help="source text per shard")
    ] = 256,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, max=_MOST, help="processes (default: one per core)"),
    ] = None,
) -> int:
    """Tokenize text, JSON Lines and Parquet into a corpus. The same command resumes an interrupted run."""
    from disttrain.corpora.settings import Settings, SpecialTokens
    from disttrain.data import prepare_corpus

    if special_tokens not in list(SpecialTokens):
        raise typer.BadParameter(f"--special-tokens is '{special_tokens:.60}', expected {', '.join(SpecialTokens)}")
    return prepare_corpus(
        Settings(
            sources=tuple(sources),
            tokenizer=tokenizer,
            output=output,
            pattern=pattern,
            field=field,
            end_of_document=end_of_document,
            begin_of_document=begin_of_document,
            special_tokens=SpecialTokens(special_tokens),
            part_bytes=shard_size * 2**20,
            workers=len(os.sched_getaffinity(0)) if workers is None else workers,
        )
    )


@data.command(context_settings=_SETTINGS)
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Show the content of a corpus, from its manifest and the sizes of its files."""
    from disttrain.data import inspect_corpus

    return inspect_corpus(folder, as_json)


@data.command(context_settings=_SETTINGS)
def verify(folder: Annotated[Path, typer.Argument(metavar="FOLDER")]) -> int:
    """Verify every byte of a corpus against the digests of its manifest."""
    from disttrain.data import verify_corpus

    return verify_corpus(folder)
