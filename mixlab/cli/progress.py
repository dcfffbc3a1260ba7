"""What people see while they wait; pipes and files see nothing of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mixlab.cli.printing import wide_open


class CountingBar:
    """How far something is."""

    def __init__(self, update: Callable[..., None]) -> None:
        self.update = update

    def reach(self, done: int, total: int) -> None:
        """So much is done, of so much in all."""
        self.update(completed=done, total=total)

    def advance(self, more: int, total: int) -> None:
        """So much more is done, of so much in all."""
        self.update(advance=more, total=total)

    def tell(self, what: str, done: int, total: int) -> None:
        """What is done now, and how far that is."""
        self.update(description=what, completed=done, total=total)


@contextmanager
def progress(title: str) -> Iterator[CountingBar]:
    """A bar that is gone afterwards."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not wide_open()) as shown:
        task = shown.add_task(title, total=None)
        yield CountingBar(lambda **words: shown.update(task, **words))


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """A line that says what is being done, for work of unknown length."""
    if not wide_open():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as shown:
        yield lambda text: shown.update(text)
