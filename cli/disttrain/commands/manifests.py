"""Verbs about manifests, which need no cluster."""

from enum import StrEnum
from typing import Annotated

import typer

from disttrain.commands.options import MANIFEST


class PlanFormat(StrEnum):
    """Formats of `plan -o`."""

    TABLE = "table"
    JSON = "json"


def validate(
    files: Annotated[list[str], MANIFEST],
) -> int:
    """Check manifests and list every error, before anything is applied."""
    from disttrain.validate import validate

    return max(validate(path) for path in files)


def plan(
    file: Annotated[str, MANIFEST],
    rank: Annotated[int, typer.Option("--rank", metavar="N", help="rank whose memory is estimated")] = 0,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help="fail if the rank needs more, such as 80Gi")
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option("--accelerator", metavar="NAME", help="device of each rank, such as H100")
    ] = None,
    flops: Annotated[
        str | None, typer.Option("--flops", metavar="RATE", help="FLOP/s that a rank reaches, such as 400T")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", metavar="RATE", help="bytes per second of a rank, such as 12.5G")
    ] = None,
    pod_bandwidth: Annotated[
        str | None, typer.Option("--pod-bandwidth", metavar="RATE", help="the same between ranks of a pod")
    ] = None,
    latency: Annotated[
        float | None, typer.Option("--latency", metavar="US", help="microseconds of a message (default: 20)")
    ] = None,
    collectives: Annotated[
        str | None,
        typer.Option("--collectives", metavar="FILE", help="output of disttrain collectives --json, for both"),
    ] = None,
    layouts: Annotated[bool, typer.Option("--layouts", help="rank the layouts of the job by their time")] = False,
    most: Annotated[int, typer.Option("--most", metavar="N", min=1, help="layouts that are estimated")] = 24,
    within: Annotated[
        float, typer.Option("--within", metavar="SECONDS", min=1, help="begin no further estimate later")
    ] = 300,
    write: Annotated[
        str | None, typer.Option("--write", metavar="FILE", help="write the manifest with the best layout")
    ] = None,
    row: Annotated[int, typer.Option("--row", metavar="N", help="row of the ranking that --write writes")] = 1,
    output: Annotated[
        PlanFormat, typer.Option("-o", "--output", metavar="FORMAT", help="table or json", show_default=False)
    ] = PlanFormat.TABLE,
) -> int:
    """Show the objects of a job, and memory, messages and time of a rank's step."""
    from disttrain.planning.machine import Given

    given = Given(gpu_memory, accelerator, flops, bandwidth, pod_bandwidth, latency, collectives)
    as_json = output is PlanFormat.JSON
    if layouts:
        from disttrain.layouts import Bounds
        from disttrain.layouts import layouts as rank_layouts

        return rank_layouts(file, given, Bounds(most, within), write, row, as_json=as_json)
    if write is not None:
        raise typer.BadParameter("--write writes a row of a ranking: give --layouts, too")
    from disttrain.plan import plan

    return plan(file, rank, given, as_json=as_json)


def explain(
    field: Annotated[
        str | None, typer.Argument(metavar="FIELD", help="for example spec.training.steps", show_default=False)
    ] = None,
) -> int:
    """Explain a field of a job: meaning, type, default and subfields. Without FIELD: from the top."""
    from disttrain.explain import explain
    from disttrain.output import show

    show(explain(field))
    return 0


def init(
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="name of the job (asked for)")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="mlp, resnet or gpt")] = None,
    script: Annotated[
        str | None, typer.Option("--script", metavar="FILE", help="your own program, instead of a model")
    ] = None,
    image: Annotated[str | None, typer.Option("--image", metavar="IMAGE", help="image that contains it")] = None,
    workers: Annotated[int | None, typer.Option("--workers", metavar="N", help="pods (asked for)")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", metavar="N", help="GPUs of each pod (asked for)")] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="optimizer steps")] = 100,
    storage: Annotated[
        str | None, typer.Option("--storage", metavar="SIZE", help="keep checkpoints in a claim of this size")
    ] = None,
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="file; - prints it")] = "job.yaml",
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing file")] = False,
) -> int:
    """Write a commented manifest. Options set its content; on a terminal the command asks for the missing ones."""
    from disttrain.prompts import answered, deliver

    options = answered(
        name=name, model=model, script=script, image=image, workers=workers, gpus=gpus, steps=steps, storage=storage
    )
    return deliver(options, output, force=force)
