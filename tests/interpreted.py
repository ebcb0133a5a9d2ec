"""Where Triton's kernels are tested: on a GPU, or interpreted without one (`conftest`), for which
two things that Triton 3.6's interpreter can not do are made good here, and most of its time is
saved: it searches the whole language for what it replaces, again in each call of a function. Of
each tensor it makes the type of its shape, which nobody asks for, and a table of all types."""

import inspect
import os
import sys
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
_tuple_init: Any = tl.core.tuple.__init__
_tuple_getattr: Any = tl.core.tuple.__getattr__
_ADDRESS = np.dtype(np.uint64)
_replaced: set[int] = set()
"""Modules in which the language is replaced while a kernel runs."""


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Its scalars are arrays of one element, which numpy 2.4 no longer takes for numbers where
    `range` needs one."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


@cache
def _languages_of(module: str) -> frozenset[int]:
    """The modules of the language that a module has imported."""
    values = vars(sys.modules[module]).values()
    return frozenset(id(one) for one in values if one is tl or one is tl.core)


def _patch_lang(function: Any) -> Any:
    """Once in a kernel, for all functions that it calls, and not once for each call."""
    modules = _languages_of(function.__module__)
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


def _init_tuple(self: Any, args: Any, type: Any = None) -> None:
    """Its type is made when it is asked for."""
    if type is None:
        self.values = list(args)
    else:
        _tuple_init(self, args, type)


def _tuple_attribute(self: Any, name: str) -> Any:
    if name != "type":
        return _tuple_getattr(self, name)
    self.type = tl.core._type_for_tuple_values(self.values)
    return self.type


_scalar_np_dtype = cache(interpreter._get_np_dtype)


def _get_np_dtype(kind: Any) -> Any:
    scalar = kind.scalar
    return _ADDRESS if isinstance(scalar, tl.pointer_type) else _scalar_np_dtype(scalar)


tl.core.tuple.__init__ = _init_tuple
tl.core.tuple.__getattr__ = _tuple_attribute
interpreter._get_np_dtype = _get_np_dtype
interpreter._patch_lang = _patch_lang
interpreter._patch_builtin = _patch_builtin
interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter.InterpreterBuilder.create_dot = _create_dot
