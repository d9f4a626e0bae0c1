"""`disttrain init`: a few answers -> a commented manifest that `disttrain validate` accepts."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from disttrain.errors import USAGE, CommandError
from disttrain_api import manifest
from disttrain_api.errors import ManifestError
from disttrain_api.names import API_VERSION, KIND, MAX_JOB_NAME_LENGTH, MAX_REPLICAS


class BuiltIn(StrEnum):
    """Models that the trainer brings along, each with data that needs no files."""

    MLP = "mlp"
    RESNET = "resnet"
    GPT = "gpt"


_DATA = {BuiltIn.MLP: "digits", BuiltIn.RESNET: "digits", BuiltIn.GPT: "text"}
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SIZE = re.compile(r"[1-9]\d{0,6}(Ki|Mi|Gi|Ti)")


@dataclass(frozen=True)
class ManifestOptions:
    """Content of the manifest."""

    name: str = "my-job"
    model: BuiltIn = BuiltIn.MLP
    script: str | None = None
    """A program of one's own, started by torchrun; it takes the place of the model."""
    image: str | None = None
    workers: int = 2
    gpus: int = 0
    """GPUs of each worker."""
    steps: int = 100
    storage: str | None = None
    """Size of the claim that checkpoints outlive pods in; None: none."""


def manifest_text(options: ManifestOptions) -> str:
    """Return the manifest, with a comment on each part. Raises CommandError where a wish cannot be met."""
    _refuse(options)
    text = "\n".join(_lines(options)) + "\n"
    try:
        manifest.parse(text)
    except ManifestError as error:
        raise CommandError("; ".join(map(str, error.problems)), USAGE) from error
    return text


def write(options: ManifestOptions, target: Path, *, force: bool) -> None:
    """Write the manifest into a file. Raises CommandError where there is one already."""
    text = manifest_text(options)
    try:
        with target.open("w" if force else "x") as file:
            file.write(text)
    except FileExistsError as error:
        raise CommandError(f"{target} exists: name another file with -o, or give --force") from error
    except OSError as error:
        raise CommandError(f"cannot write {target}: {error.strerror}") from error


def _refuse(options: ManifestOptions) -> None:
    if not _NAME.fullmatch(options.name) or len(options.name) > MAX_JOB_NAME_LENGTH:
        expected = f"lower case letters, digits and dashes, a letter first, at most {MAX_JOB_NAME_LENGTH}"
        raise CommandError(f"--name '{options.name}': expected {expected}", USAGE)
    for option, value, most in (("--workers", options.workers, MAX_REPLICAS), ("--steps", options.steps, 10**9)):
        if not 1 <= value <= most:
            raise CommandError(f"{option} {value}: expected 1 to {most}", USAGE)
    if not 0 <= options.gpus <= 1024:
        raise CommandError(f"--gpus {options.gpus}: expected 0 to 1024", USAGE)
    if options.storage is not None and not _SIZE.fullmatch(options.storage):
        raise CommandError(f"--storage '{options.storage}': expected a size such as 10Gi", USAGE)
    for option, text in (("--script", options.script), ("--image", options.image)):
        if text is not None and not (text.isprintable() and 0 < len(text) <= 1000):
            raise CommandError(f"{option}: expected a line of at most 1000 characters", USAGE)
    if options.script is not None and options.image is None:
        raise CommandError("--script needs --image: the image that holds the script and what it imports", USAGE)


def _lines(options: ManifestOptions) -> Iterator[str]:
    yield "# Written by `disttrain init`. `disttrain explain spec.training.steps` explains a field."
    yield "# `disttrain run FILE` runs it on this machine, `disttrain submit FILE` creates the job on a cluster."
    yield f"apiVersion: {API_VERSION}"
    yield f"kind: {KIND}"
    yield "metadata:"
    yield f"  name: {_quoted(options.name)}"
    yield "spec:"
    yield "  workers:"
    yield "    # Pods. Each is one process, or one process for each of its GPUs."
    yield f"    replicas: {options.workers}"
    if options.gpus:
        yield f"    gpusPerPod: {options.gpus}"
    else:
        yield "    # gpusPerPod: 8"
    if options.image is not None:
        yield f"    image: {_quoted(options.image)}"
    if options.script is not None:
        yield "    # torchrun finds ranks and addresses in its environment: docs/own-programs.md."
        yield f"    command: [torchrun, {_quoted(options.script)}]"
    yield "    # resources:"
    yield "    #   requests: {cpu: '4', memory: 16Gi}"
    if options.script is None:
        yield from _training(options)
    yield from _storage(options)
    yield "  runPolicy:"
    yield "    # Restarts without a new checkpoint between them before the job fails: docs/failures.md."
    yield "    maxRestarts: 3"


def _training(options: ManifestOptions) -> Iterator[str]:
    yield "  # Parallelism; without this, all ranks are data-parallel replicas: docs/parallelism.md."
    yield "  # parallelism:"
    yield "  #   dataParallelShardDegree: 2"
    yield "  training:"
    yield "    model:"
    yield "      # mlp, resnet or gpt; or `entrypoint: package.module:function` for your own."
    yield f"      name: {options.model}"
    yield "    data:"
    yield f"      name: {_DATA[options.model]}"
    yield f"    steps: {options.steps}"
    yield "    # Samples for each rank and step."
    yield "    microBatchSize: 16"
    yield "    optimizer:"
    yield "      name: AdamW"
    yield "      learningRate: 0.001"
    if options.storage is not None:
        yield "    checkpoint:"
        yield "      # Steps between two checkpoints."
        yield f"      interval: {max(options.steps // 10, 1)}"


def _storage(options: ManifestOptions) -> Iterator[str]:
    if options.storage is None:
        yield "  # Without storage a restart begins at step 0: docs/checkpoints.md."
        yield "  # storage:"
        yield "  #   claimName: checkpoints"
        return
    yield "  # Where checkpoints outlive pods. All pods must see the same volume."
    yield "  storage:"
    yield "    volumeClaimTemplate:"
    yield "      spec:"
    yield "        accessModes: [ReadWriteMany]"
    yield f"        resources: {{requests: {{storage: {options.storage}}}}}"


def _quoted(text: str) -> str:
    """Return the text as YAML reads it back, in quotes where it needs them."""
    return text if re.fullmatch(r"[a-z][a-z0-9./:-]*[a-z0-9]", text) and text not in _WORDS else json.dumps(text)


_WORDS = ("true", "false", "null", "yes", "no", "on", "off")
