"""`c2cserve top --cluster` on a terminal, beside what /metrics says of the same nodes."""

import asyncio
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Generator
from contextlib import contextmanager

from ray_cluster import Front, Machines
from server_process import wait_until
from streams import all_streams

from c2cserve.bench.scrape import scrape
from c2cserve.terminal.output import show_bytes

ROWS, COLUMNS = 40, 120
NUMBERS = ("running", "waiting", "models", "pool_used_bytes", "pool_budget_bytes")


class Screen:
    """What a full-screen program shows last: each frame begins at the upper left corner."""

    def __init__(self) -> None:
        self._data = b""

    def read(self, terminal: int) -> None:
        try:
            while data := os.read(terminal, 1 << 16):
                self._data = (self._data + data)[-(1 << 20) :]
        except OSError:  # the program has ended
            return

    def lines(self) -> list[str]:
        """Return the lines of the last frame that is whole: another one has begun."""
        frames = self._data.split(b"\x1b[H")[1:-1]
        shown = frames[-1].decode(errors="replace") if frames else ""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines()

    def rows(self) -> dict[str, list[str]]:
        """Return the cells of each row of its tables, by the first one."""
        rows = [line.split("│")[1:-1] for line in self.lines() if line.startswith("│")]
        return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


@contextmanager
def top(url: str) -> Generator[Screen]:
    """Run it on a terminal of its own; q ends it."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = ["-m", "c2cserve.cli.main", "top", "--cluster", "--every", "0.2", "--url", url]
    process = subprocess.Popen(
        [sys.executable, *command], stdin=its, stdout=its, stderr=its,
        env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(its)
    screen = Screen()
    threading.Thread(target=screen.read, args=[ours], daemon=True).start()
    try:
        yield screen
        os.write(ours, b"q")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def said(front: Front) -> dict[str, list[str]]:
    """What /metrics says of each node that is up, as the screen shows it."""
    metrics = scrape(front.url, None)
    states = front.state()["nodes"]
    found: dict[str, list[str]] = {}
    for name in (one for one, state in states.items() if state == "up"):
        assert metrics.total("c2cserve:node_up", node=name) == 1.0
        values = [int(metrics.total(f"c2cserve:node_{one}", node=name)) for one in NUMBERS]
        found[name] = [*(str(one) for one in values[:3]), *(show_bytes(one) for one in values[3:])]
    return found


def test_the_screen_says_of_each_node_what_the_metrics_say(
    machines: Machines, front: Front
) -> None:
    [left, right, leaves] = machines.states()
    machines.drain(leaves)
    front.wait_nodes(2)
    with top(front.url) as screen:

        def agree() -> bool:
            rows, right_ones = screen.rows(), said(front)
            shown = {name: rows[name][2:7] for name in right_ones if name in rows}
            return shown == right_ones and all(rows[name][0] == "up" for name in right_ones)

        def busy() -> bool:
            rows = [screen.rows().get(one.name, []) for one in (left, right)]
            return any(row and int(row[2]) > 0 and int(row[7]) > 0 for row in rows)

        wait_until(agree, 60, "screen and metrics agree")
        streams = threading.Thread(target=lambda: asyncio.run(all_streams(front.url, 12, 400)))
        streams.start()
        wait_until(busy, 60, "requests and tokens per second are seen")
        streams.join()
        wait_until(agree, 60, "they agree after a load, too")
        assert len(said(front)) == 2
        assert screen.rows()[left.name][1] == "1 of 1"
        lines = screen.lines()
        assert len(lines) <= ROWS
        assert not any("/cpu0" in line.split("│")[1] for line in lines if line.startswith("│"))
        machines.resume(leaves)
        front.wait_nodes(3)
        wait_until(lambda: agree() and leaves.name in screen.rows(), 60, "it is there again")
