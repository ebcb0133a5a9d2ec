"""Where Triton's kernels are tested: on a GPU, or interpreted without one (`conftest`), for which
two things that Triton 3.6's interpreter can not do are made good here, and most of its time is
saved: it searches the whole language for what it replaces, again in each call of a function."""

import inspect
import os
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") else "cuda")

_patch: Any = interpreter._patch_lang_tensor
_patch_all: Any = interpreter._patch_lang
_dot: Any = interpreter.InterpreterBuilder.create_dot
_replaced: set[int] = set()
"""Modules in which the language is replaced while a kernel runs."""


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Its scalars are arrays of one element, which numpy 2.4 no longer takes for numbers where
    `range` needs one."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _patch_lang(function: Any) -> Any:
    """Once in a kernel, for all functions that it calls, and not once for each call."""
    values = function.__globals__.values()
    modules = {id(one) for one in values if inspect.ismodule(one) and one in (tl, tl.core)}
    if modules and modules <= _replaced:
        return None  # the scope of a call, which nobody restores
    scope, outermost = _patch_all(function), not _replaced
    _replaced.update(modules)
    if outermost:
        restore = scope.restore

        def restored() -> None:
            _replaced.clear()
            restore()

        scope.restore = restored
    return scope


@cache
def _builtins_of(package: Any) -> tuple[str, ...]:
    members = inspect.getmembers(package)
    return tuple(name for name, member in members if tl.core.is_builtin(member))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins_of(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


def _create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """It multiplies the bits of bfloat16 numbers."""
    return _dot(self, _widened(a), _widened(b), *rest)


def _widened(handle: Any) -> Any:
    if handle.dtype != tl.bfloat16:
        return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


interpreter._patch_lang = _patch_lang
interpreter._patch_builtin = _patch_builtin
interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter.InterpreterBuilder.create_dot = _create_dot
