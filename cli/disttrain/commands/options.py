"""Options that several verbs have."""

from enum import StrEnum
from typing import Annotated

import typer

JobName = Annotated[str, typer.Argument(metavar="JOB", help="name of a job", show_default=False)]
MANIFEST = typer.Argument(metavar="FILE", help="manifest of a DistTrainingJob; - is standard input", show_default=False)
Namespace = Annotated[
    str | None, typer.Option("-n", "--namespace", metavar="NAME", help="namespace (default: the context's)")
]
Context = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="context of the kubeconfig (default: the current one)")
]


class Format(StrEnum):
    """Formats of `-o`."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[
    Format, typer.Option("-o", "--output", metavar="FORMAT", help="table, wide, json or yaml", show_default=False)
]
