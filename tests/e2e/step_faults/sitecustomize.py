"""Makes steps fail, in every Python process that has this folder on its PYTHONPATH.

Faults are names of files in $C2CSERVE_TEST_FAULTS. `once`: the next step fails, and takes the file
away. While they are there: `token-N`: steps with a request whose prompt has token N; `model-NAME`:
steps of that model; `all`: every step; `slow`: steps take seconds, `slow-N`: N ms more; `kill-N`:
the process dies in a step with a request whose prompt has token N.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from after_import import after_import

_FOLDER = Path(os.environ["C2CSERVE_TEST_FAULTS"])
_EXECUTOR = "c2cserve.engine.executor"
_SLOW_S = 4.0


def _strike(seqs: list[Any]) -> None:
    for fault in sorted(path.name for path in _FOLDER.iterdir()):
        kind, _, of = fault.partition("-")
        if kind == "slow":
            time.sleep(int(of) / 1000 if of else _SLOW_S)
            continue
        if kind == "once":
            with contextlib.suppress(FileNotFoundError):
                (_FOLDER / fault).unlink()
                raise RuntimeError("an injected fault: once")
        if kind == "kill" and any(int(of) in seq.job.tokens for seq in seqs):
            os.kill(os.getpid(), signal.SIGKILL)
        hit = (
            kind == "all"
            or (kind == "token" and any(int(of) in seq.job.tokens for seq in seqs))
            or (kind == "model" and seqs[0].job.request.model == of)
        )
        if hit:
            raise RuntimeError(f"an injected fault: {fault}")


def _break(executor: Any) -> None:
    sound = executor.build_batch

    def build_batch(parts: list[Any], seqs: list[Any]) -> Any:
        _strike(seqs)
        return sound(parts, seqs)

    executor.build_batch = build_batch


# Only workers ever load the executor.
after_import(_EXECUTOR, _break)
