"""A command that is started without standard streams, as some supervisors do."""

import subprocess
import sys

PROBE = """
import os, sys
from c2cserve.cli.main import app
sys.argv = ["c2cserve", "version"]
try:
    app()
except SystemExit as end:
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)]
    os._exit(end.code or (0 if names == ["/dev/null"] * 3 else 9))
"""


def test_closed_streams_are_opened_as_dev_null() -> None:
    command = 'exec "$0" -c "$1" <&- >&- 2>&-'
    done = subprocess.run(["bash", "-c", command, sys.executable, PROBE], check=False, timeout=100)
    assert done.returncode == 0
