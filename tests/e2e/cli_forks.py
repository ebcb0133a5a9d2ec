"""The command line in forks of one process that has imported it: a command costs no imports.

Each command still has a process of its own, with its exit status, output and environment. A `serve`
that ends with an error starts no children before. (Tests of imports and of the interpreter's own
options start interpreters: tests/cpu/cli/test_main.py.)
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

_CODE = """
import json, os, sys, traceback
from c2cserve.cli import bench, keys, main, models, replay, serve

def command(asked):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, path in ((1, asked["out"]), (2, asked["err"])):
        os.dup2(os.open(path, os.O_WRONLY), fd)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["directory"])
    sys.argv = ["c2cserve", *asked["args"]]
    try:
        main.app(asked["args"])
    except SystemExit as end:
        return end.code
    except BaseException:
        traceback.print_exc()
        return 1

answers = os.fdopen(os.dup(1), "w", buffering=1)
for line in os.fdopen(os.dup(0)):
    pid = os.fork()
    if pid == 0:
        answers.close()
        status = command(json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(pid, file=answers)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers)
"""


_ENVIRONMENT = dict(os.environ)
"""Before any test changes it: what a test injects is for its own command."""


class CliForks:
    """One of them serves all commands of a test process, one at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            bufsize=0, env=_ENVIRONMENT, start_new_session=True,
        )  # fmt: skip
        atexit.register(self._end)

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, args: tuple[str, ...], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` does it, with its output as text. Raises TimeoutExpired."""
        commands, answers = self._process.stdin, self._process.stdout
        assert commands is not None
        assert answers is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            out.touch()
            err.touch()
            asked = {
                "args": args, "out": str(out), "err": str(err), "environment": dict(os.environ),
                "directory": str(Path.cwd()),
            }  # fmt: skip
            commands.write(json.dumps(asked).encode() + b"\n")
            pid = int(answers.readline())
            late = not select.select([answers], [], [], timeout_s)[0]
            if late:
                os.kill(pid, signal.SIGKILL)
            status = int(answers.readline())
            if late:
                raise subprocess.TimeoutExpired(args, timeout_s, out.read_text(), err.read_text())
            return subprocess.CompletedProcess(args, status, out.read_text(), err.read_text())
