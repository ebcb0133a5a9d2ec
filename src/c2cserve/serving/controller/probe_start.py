"""Starting the child that tries tokenizers. Nothing large is imported: the command line starts it
ahead."""

import subprocess
import sys

from c2cserve.processes.prestarted import Prestarted
from c2cserve.runtime.environment import child_environment


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "c2cserve.serving.controller.tokenizer_probe"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=child_environment(),
    )  # fmt: skip


PROBES = Prestarted(_start)
