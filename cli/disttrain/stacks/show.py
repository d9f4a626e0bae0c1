"""`disttrain stacks`: where each rank is, in a line, or the whole stacks of some."""

from disttrain.client import Client
from disttrain.commands.options import Format
from disttrain.errors import CommandError
from disttrain.jobs import formatted, hint
from disttrain.logs.pick import parse_ranks
from disttrain.output import print_stderr, show
from disttrain.stacks.of_cluster import Stacks
from disttrain.terminal import plain, plain_lines
from disttrain_operator.decide.collectives import where_groups_are
from disttrain_operator.decide.stacks import blame_of, main_stack

_SHOWN = 2**18
"""Letters of a rank's stacks."""


def show_stacks(client: Client, name: str, *, ranks: str | None, output: Format) -> int:
    """Show where the ranks are: without `ranks` the calls of each one's main thread, with them all of their threads."""
    found = client.stacks(name, ranks=parse_ranks(ranks))
    for sentence in found.missing:
        print_stderr(f"disttrain: {plain_lines(sentence)}")
    texts = found.found
    if not texts:
        raise CommandError(f"no rank of {name} gave its stacks")
    if output in (Format.JSON, Format.YAML):
        show(formatted({"stacks": {str(rank): text for rank, text in texts.items()}}, output))
    elif ranks is None:
        _show_lines(found)
    else:
        show("\n\n".join(f"--- rank {rank} ---\n{plain_lines(text, most=_SHOWN)}" for rank, text in texts.items()))
    hint(f"disttrain stacks {name} --rank {min(texts)}", f"disttrain why {name}")
    return 0


def _show_lines(learned: Stacks) -> None:
    stacks = learned.found
    width = len(str(max(stacks)))
    for rank, text in stacks.items():
        show(f"[rank {rank:>{width}}] {plain(main_stack(text))}")
    blame = blame_of(stacks, whole=learned.whole, together=learned.together)
    if blame is not None and len(stacks) > 1:
        show(plain(blame.why) if blame.rank is None else f"rank {blame.rank} {plain(blame.why)}")
    if recorded := where_groups_are(stacks):
        show(plain(recorded))
