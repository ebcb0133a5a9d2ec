"""Breaks a GPU slice's next step, in every Python process that has this folder on its PYTHONPATH.

The fault is the name of a file in $C2CSERVE_TEST_FAULTS; the step that it hits takes it away.
"""

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from after_import import after_import

_FOLDER = Path(os.environ["C2CSERVE_TEST_FAULTS"])
_OPS = "c2cserve.engine.gpu.ops"
_NOWHERE = 1 << 50
"""As the place of a token's keys and values: terabytes behind the arena."""


def _take(fault: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        (_FOLDER / fault).unlink()
        return True
    return False


def _break(ops: Any) -> None:
    sound = ops.run_layers

    def run_layers(
        self: Any, hidden: Any, layers: Any, rows: Any, rope: Any, arena: Any, wanted: Any = None
    ) -> None:
        if _take("memory"):
            hidden.new_empty(1 << 50)
        if _take("address"):
            rows = replace(rows, slots=rows.slots.new_full(rows.slots.shape, _NOWHERE))
        sound(self, hidden, layers, rows, rope, arena, wanted)

    launch = ops._launch_layers

    def launch_layers(self: Any, *args: Any) -> Any:
        branch = launch(self, *args)
        if sys.modules["torch"].cuda.is_current_stream_capturing() and _take("capture"):
            raise RuntimeError("an injected fault in the middle of a capture")
        return branch

    ops.run_layers = run_layers
    ops._launch_layers = launch_layers


# Only workers of GPU slices ever load the operators.
after_import(_OPS, lambda module: _break(module.GpuOps))
