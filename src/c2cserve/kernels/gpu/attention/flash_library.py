"""FlashInfer as far as it is here: the library, and modules that were built ahead.

Modules are looked for in our folder of kernels, then where FlashInfer itself looks: what came with
it, and packages of ready modules. What is in none of them is not compiled but left to our kernel,
which a line in the log says, and `/metrics` by steps.
"""

import logging
import os
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from c2cserve.kernels.gpu.aot.compiler import default_folder
from c2cserve.kernels.gpu.aot.flash_modules import MODULES, FlashKind, installed, modules_folder
from c2cserve.kernels.gpu.attention.flash import Flash

log = logging.getLogger(__name__)

_ROOM_BYTES = 1 << 20
"""Bytes for sums of split contexts, which wrappers ask for and this kernel does not make."""
_HEADS = (32, 8)
"""Elements of queries and keys, for a first run: a module takes any."""
_HEAD_DIMS = (64, 128, 256)
"""That FlashInfer has FlashAttention 3 for."""
_LOADING = Lock()
"""Where to look is the library's own variable, and slices of one process start on threads."""


class FlashInfer:
    """One per slice; belongs to its thread and stream."""

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        """`folder`: of built kernels. Loads the modules that most models need."""
        self._library, self._why_not = _imported()
        self._loaded: dict[tuple[FlashKind, int], bool] = {}
        library = self._library
        if library is None:
            self.flash = Flash(device, None)
            log.warning("prompts take our own attention, the slower one: %s", self._why_not)
            return
        self._env: Any = import_module("flashinfer.jit.env")
        self._missing: type[Exception] = import_module("flashinfer.jit").MissingJITCacheError
        version = installed() or library.__version__
        ours = modules_folder(folder or default_folder(), version)
        self._places = (ours, self._env.FLASHINFER_AOT_DIR)
        room = torch.zeros(_ROOM_BYTES, dtype=torch.uint8, device=device)
        self.flash = Flash(
            device,
            lambda: library.BatchPrefillWithPagedKVCacheWrapper(room, "HND", backend="fa3"),
        )
        lacking = [kind.name for kind in MODULES if not self._load(kind, *_HEADS)]
        if lacking:
            log.warning(
                "prompts of some models take our own attention, the slower one: FlashInfer %s has"
                " no %s (`c2cserve kernels build`)", version, ", ".join(lacking),
            )  # fmt: skip

    def load(self, kind: FlashKind, heads: int, kv_heads: int) -> None:
        """Have the module of a model's kind loaded, if there is one."""
        if self._library is not None and not self._load(kind, heads, kv_heads):
            log.info("prompts take our own attention: FlashInfer has no %s", kind.name)

    def _load(self, kind: FlashKind, heads: int, kv_heads: int) -> bool:
        key = kind, heads
        if key not in self._loaded:
            self._loaded[key] = kind.head_dim in _HEAD_DIMS and any(
                self._load_from(place, kind, heads, kv_heads) for place in self._places
            )
        return self._loaded[key]

    def _load_from(self, place: Path, kind: FlashKind, heads: int, kv_heads: int) -> bool:
        with _LOADING:
            usual = self._env.FLASHINFER_AOT_DIR
            # Read whenever a module is looked for; FlashInfer's own builds ahead set it so too.
            self._env.FLASHINFER_AOT_DIR = place
            try:
                self.flash.ready(kind, heads, kv_heads)
            except self._missing:
                return False
            except OSError as error:  # it writes sources into its workspace, needed or not
                log.warning("FlashInfer cannot use its workspace: %s", error)
                return False
            finally:
                self._env.FLASHINFER_AOT_DIR = usual
        return True


def _imported() -> tuple[Any, str]:
    """The library, or None and why."""
    os.environ["FLASHINFER_DISABLE_JIT"] = "1"
    try:
        return import_module("flashinfer"), ""
    except ModuleNotFoundError as error:
        if error.name == "flashinfer":
            return None, "FlashInfer is not installed (pip install '.[flash]' in the checkout)"
        return None, f"FlashInfer does not load: {error}"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return None, f"FlashInfer does not load: {error}"
