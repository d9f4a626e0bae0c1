"""The verbs of `disttrain`: a table of names, and the group that imports a verb's module when it is called.

So `--help` and each verb pay for their own imports alone: neither torch nor a cluster's client is loaded at the start.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperGroup


@dataclass(frozen=True)
class Verb:
    """Place of a command's function, and its line in `disttrain --help`."""

    place: str
    """`module:name` of a function, whose signature is the verb's command line and which returns the exit code; or of a
    Typer with verbs of its own."""
    help: str


# One line for each verb: section -> name -> Verb. `disttrain --help` shows them in this order.
SECTIONS: dict[str, dict[str, Verb]] = {
    "On this machine": {
        "run": Verb("disttrain.commands.machine:run", "run a job on this machine, without a cluster"),
        "collectives": Verb(
            "disttrain.commands.machine:collectives", "check and benchmark collectives on this machine"
        ),
        "export": Verb("disttrain.commands.machine:export", "export the model of a checkpoint to files"),
        "data": Verb("disttrain.commands.data:data", "prepare, inspect and verify corpora of tokens"),
    },
    "Manifests": {
        "init": Verb("disttrain.commands.manifests:init", "write a commented manifest from a few answers"),
        "validate": Verb("disttrain.commands.manifests:validate", "check a manifest and list every error"),
        "plan": Verb("disttrain.commands.manifests:plan", "show the objects of a job, and what a rank needs and sends"),
        "explain": Verb("disttrain.commands.manifests:explain", "explain a field of a job"),
    },
    "On a cluster": {
        "submit": Verb("disttrain.commands.act:submit", "create a job on a cluster"),
        "list": Verb("disttrain.commands.look:list_", "list jobs, with their progress"),
        "get": Verb("disttrain.commands.look:get", "show a job, also as YAML or JSON"),
        "top": Verb("disttrain.commands.look:top", "show jobs as a live table with their progress"),
        "describe": Verb("disttrain.commands.look:describe", "show a job in detail: mesh, attempts, pods, events"),
        "why": Verb("disttrain.commands.look:why", "explain the state of a job, and what to do"),
        "logs": Verb("disttrain.commands.look:logs", "show or follow the logs of a job's ranks"),
        "stacks": Verb("disttrain.commands.look:stacks", "show where the ranks of a job are at the moment"),
        "events": Verb("disttrain.commands.look:events", "show the events on a job and its pods"),
        "history": Verb("disttrain.commands.look:history", "list what finished jobs came to, also deleted ones"),
        "checkpoint": Verb("disttrain.commands.act:checkpoint", "have a running job write a checkpoint now"),
        "suspend": Verb("disttrain.commands.act:suspend", "stop a job's pods after a checkpoint"),
        "resume": Verb("disttrain.commands.act:resume", "resume a suspended job"),
        "restart": Verb("disttrain.commands.act:restart", "restart a job from a new checkpoint"),
        "delete": Verb("disttrain.commands.act:delete", "delete jobs and their pods"),
    },
    "Other": {
        "dashboard": Verb("disttrain.commands.dashboard:dashboard", "serve web pages about runs or jobs"),
        "doctor": Verb("disttrain.commands.look:doctor", "check that a cluster has what jobs need"),
        "version": Verb("disttrain.commands.machine:version", "print the version"),
    },
}
VERBS = {name: verb for verbs in SECTIONS.values() for name, verb in verbs.items()}


class VerbGroup(TyperGroup):
    """The group of all verbs. It loads one when it is called, and lists them from the table."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        verb = VERBS.get(cmd_name)
        return None if verb is None else _command(cmd_name, verb)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, VERBS))
        for section, verbs in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), verb.help) for name, verb in verbs.items()])


def _command(name: str, verb: Verb) -> Any:
    module, _, attribute = verb.place.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if isinstance(found, typer.Typer):
        group = typer.main.get_command(found)
        group.name = name
        return group
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, context_settings=_SETTINGS)(found)
    return typer.main.get_command(app)


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_FOOT = "Exit codes: 0 done, 1 refused or failed, 2 wrong usage; docs/command-line.md lists all."


def command() -> Any:
    """Return the whole command."""
    app = typer.Typer(
        cls=VerbGroup,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=_SETTINGS,
        epilog=_FOOT,
        subcommand_metavar="COMMAND …",
        help="Train PyTorch models on this machine or a cluster.",
    )
    app.callback()(_nothing)
    return typer.main.get_command(app)


def _nothing() -> None:
    return None
