"""The questions of `disttrain init`, and where its manifest goes."""

from pathlib import Path

from disttrain.errors import USAGE, CommandError
from disttrain.init import BuiltIn, ManifestOptions, manifest_text, write
from disttrain.jobs import hint
from disttrain.output import prompt, show

_NONE = ManifestOptions()


def answered(
    *,
    name: str | None,
    model: str | None,
    script: str | None,
    image: str | None,
    workers: int | None,
    gpus: int | None,
    steps: int,
    storage: str | None,
) -> ManifestOptions:
    """Return the options; on a terminal what is None is asked for, elsewhere it is the default. Raises CommandError."""
    name = name if name is not None else _asked("name of the job", _NONE.name)
    if model is None and script is None:
        model = _asked("model: mlp, resnet or gpt", _NONE.model)
    if model is not None and script is not None:
        raise CommandError("give one of --model and --script", USAGE)
    if script is not None and image is None:
        image = _asked("image that holds the script", "") or None
    workers = workers if workers is not None else _number("pods", _NONE.workers)
    gpus = gpus if gpus is not None else _number("GPUs of each pod", _NONE.gpus)
    return ManifestOptions(name, _built_in(model or _NONE.model), script, image, workers, gpus, steps, storage)


def _built_in(model: str) -> BuiltIn:
    try:
        return BuiltIn(model)
    except ValueError:
        raise CommandError(f"--model '{model}': expected {', '.join(BuiltIn)}", USAGE) from None


def _asked(question: str, default: str) -> str:
    return prompt(f"{question} [{default}]:" if default else f"{question}:") or default


def _number(question: str, default: int) -> int:
    text = _asked(question, str(default))
    if not text.isascii() or not text.isdecimal():
        raise CommandError(f"{question}: '{text}' is no number", USAGE)
    return int(text[:12])


def deliver(options: ManifestOptions, output: str, *, force: bool) -> int:
    """Write the manifest into a file, or with `-` to standard output."""
    if output == "-":
        show(manifest_text(options).rstrip("\n"))
        return 0
    write(options, Path(output), force=force)
    show(f"{output} written")
    hint(f"disttrain validate {output}", f"disttrain run {output}", f"disttrain submit {output}")
    return 0
