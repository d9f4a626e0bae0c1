"""rich's console, which writes texts as text: of what it is given to print only colours and cursors are its own."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.segment import Segment

from disttrain_api.escape import escaped


class PlainConsole(Console):
    """A console for tables, bars and live lines with texts of others in them."""

    def render(self, *given: Any, **named: Any) -> Iterator[Segment]:
        """Yield the segments of a renderable. All that is printed passes here, what a live display draws again, too."""
        for segment in super().render(*given, **named):
            yield segment if segment.control else segment._replace(text=escaped(segment.text, lines=True))
