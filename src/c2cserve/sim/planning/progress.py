"""What a plan shows of its progress on stderr."""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from c2cserve.sim.planning.plan import Progress as Notified
from c2cserve.sim.planning.time_left import Left
from c2cserve.terminal.output import progress_console

_LINE_EVERY_S = 5.0


class _Left(ProgressColumn):
    """The time left, which runs down between two simulations."""

    def render(self, task: Task) -> Text:
        left: Left | None = task.fields["left"]
        return Text("" if left is None else str(left.after(time.monotonic() - task.fields["at_s"])))


@contextmanager
def progress() -> Generator[Notified]:
    """Yield what to notify: a bar on stderr, what was simulated last, and how long the rest takes.
    Where stderr is no terminal, a line now and then."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), _Left())
    with Progress(*columns, console=progress_console(), transient=True) as bar:
        task = bar.add_task("", total=None, left=None, at_s=0.0)
        began_s = time.monotonic()

        def show(what: str, done: int, left: Left) -> None:
            now_s = time.monotonic()
            bar.update(
                task, description=what, completed=now_s - began_s,
                total=now_s - began_s + left.about_s, left=left, at_s=now_s,
            )  # fmt: skip

        yield show


def _lines() -> Notified:
    said_s = time.monotonic()

    def show(what: str, done: int, left: Left) -> None:
        nonlocal said_s
        if (now_s := time.monotonic()) - said_s >= _LINE_EVERY_S:
            said_s = now_s
            sys.stderr.write(f"{done} simulations, {left}: {what}\n")
            sys.stderr.flush()

    return show
