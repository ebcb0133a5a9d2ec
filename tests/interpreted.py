"""Where Triton's kernels are tested: on a GPU, or interpreted without one (`conftest`), for which
two things that Triton 3.6's interpreter can not do are made good here."""

import os
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") else "cuda")

_patch: Any = interpreter._patch_lang_tensor
_dot: Any = interpreter.InterpreterBuilder.create_dot


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Its scalars are arrays of one element, which numpy 2.4 no longer takes for numbers where
    `range` needs one."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """It multiplies the bits of bfloat16 numbers."""
    return _dot(self, _widened(a), _widened(b), *rest)


def _widened(handle: Any) -> Any:
    if handle.dtype != tl.bfloat16:
        return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter.InterpreterBuilder.create_dot = _create_dot
