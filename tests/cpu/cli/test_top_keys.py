"""`top` on a terminal of its own."""

import os
import pty
import subprocess
import sys
import termios
import time

from fake_admin import FakeAdmin, model


def test_q_ends_it_and_the_terminal_is_as_before() -> None:
    ours, its = pty.openpty()
    before = termios.tcgetattr(its)
    with FakeAdmin(model("a")) as admin:
        command = ["-m", "c2cserve.cli.main", "top", "--every", "30", "--url", admin.url]
        process = subprocess.Popen(
            [sys.executable, *command], stdin=its, stdout=its, stderr=its,
            env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        shown = b""
        while b"slice" not in shown:
            shown += os.read(ours, 1 << 16)
        os.write(ours, b"xq")
        until = time.monotonic() + 10
        os.set_blocking(ours, False)
        while process.poll() is None:
            assert time.monotonic() < until, "q does not end it"
            time.sleep(0.02)
            try:
                os.read(ours, 1 << 16)
            except BlockingIOError:
                continue
        assert process.returncode == 0
    assert termios.tcgetattr(its) == before
    os.close(ours)
    os.close(its)
