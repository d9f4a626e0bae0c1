"""Verbs that work on this machine alone."""

from pathlib import Path
from typing import Annotated, Any

import typer

from disttrain.commands.options import MANIFEST
from disttrain.output import show

_RUNS = "disttrain-runs"


def run(
    file: Annotated[str | None, MANIFEST] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="FOLDER", help="resume the job in this folder")
    ] = None,
    runs: Annotated[
        Path, typer.Option("--runs", metavar="FOLDER", help="where to create the folder of the run")
    ] = Path(_RUNS),
    yes: Annotated[bool, typer.Option("-y", "--yes", help="start even if the job does not fit this machine")] = False,
) -> int:
    """Run a job as processes of this machine. Ctrl-C suspends it after a checkpoint; a second one stops it at once."""
    if (file is None) == (resume is None):
        raise typer.BadParameter("give one of FILE and --resume FOLDER")
    from disttrain import run as runner

    if resume is not None:
        return runner.resume(resume, yes=yes)
    assert file is not None
    return runner.run(file, runs, yes=yes)


def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="folder or URL of a checkpoint, or of several")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="file (.safetensors) or, with --model, folder to write")
    ],
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="FOLDER|FILE", help="folder with config.json, or manifest of the job"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="FOLDER", help="tokenizer to copy (default: that of --model)"),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="write only the LoRA adapter, for peft")] = False,
    averaged: Annotated[
        bool, typer.Option("--averaged", help="write the averages of disttrain_trainer.ema:Ema")
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", metavar="same|float32|bfloat16|float16", help="number format to write (same: the checkpoint's)"
        ),
    ] = "same",
) -> int:
    """Write the model of a checkpoint (of several, the latest), trained in any layout, into safetensors files.

    With --model a folder that transformers reads.
    """
    from disttrain.export import export
    from disttrain_trainer.runtime.object_path import location

    return export(location(checkpoint), target, model, tokenizer, adapter=adapter, averaged=averaged, dtype=dtype)


def _some(metavar: str, about: str) -> Any:
    return typer.Option(metavar=metavar, help=about, show_default=False)


def collectives(
    ranks: Annotated[int, typer.Option("--ranks", metavar="N", help="processes")] = 2,
    gpus: Annotated[bool, typer.Option("--gpus", help="give each rank a GPU, and use NCCL")] = False,
    sizes: Annotated[str | None, _some("SIZE,…", "bytes of each rank's larger buffer (default: 1Ki,1Mi)")] = None,
    operations: Annotated[str | None, _some("NAME,…", "all-reduce, send-recv, … (default: all nine)")] = None,
    groups: Annotated[str | None, _some("RANKS,…", "world, ::2, 4:8, 0+2+5 (default: world)")] = None,
    type_: Annotated[
        str | None, typer.Option("--type", metavar="NAME", help="float32, float64, int32, int64 (default: float32)")
    ] = None,
    iterations: Annotated[str | None, _some("N", "(default: 20)")] = None,
    warmup: Annotated[str | None, _some("N", "not timed (default: 5)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> int:
    """Check collectives between processes of this machine, element by element, and measure them. Exit code 1: wrong."""
    import argparse

    from disttrain.collectives import collectives
    from disttrain_trainer.checks.collectives.plan import add_arguments, plan_of

    # The trainer's own module has the same options: it parses them for both.
    parser = argparse.ArgumentParser(prog="disttrain collectives", add_help=False, exit_on_error=False)
    add_arguments(parser)
    given = {
        "sizes": sizes,
        "operations": operations,
        "groups": groups,
        "type": type_,
        "iterations": iterations,
        "warmup": warmup,
    }
    try:
        plan = plan_of(parser.parse_args([f"--{name}={value}" for name, value in given.items() if value is not None]))
    except argparse.ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    return collectives(plan, ranks=ranks, gpus=gpus, as_json=as_json)


def version() -> int:
    """Print the version."""
    from importlib.metadata import version

    show(f"disttrain {version('disttrain')}")
    return 0
