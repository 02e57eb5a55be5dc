"""Where commands print tables."""

from rich.console import Console


def console_of(narrowest: int) -> Console:
    """Return a console of at least so many columns, since a table that is broken up cannot be read."""
    console = Console()
    return console if console.width >= narrowest else Console(width=narrowest)
