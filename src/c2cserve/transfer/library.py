"""The transfer engine's shared library (`transfer/native/`), and what its functions take."""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_uint64, c_void_p
from functools import cache

from c2cserve.kernels.native import LIBRARY_FOLDER, KernelsMissing
from c2cserve.transfer.moves import Port
from c2cserve.transfer.settings import RelayShape, Settings

_FILE = "_transfer.so"
_DIRECTIONS = ("in", "out", "peer")
_PIECES_MOST = 512
"""Copies of one call to a copy engine. A relay's kernel takes fewer."""
INVALID, CLOSED = -1, -2
COUNTS = ("direct_bytes", "relayed_bytes", "tasks", "resent", "stalls", "errors")


class SettingsView(ctypes.Structure):
    """`Settings` of schedule.h."""

    _fields_ = (
        ("task_bytes", c_int64), ("task_bytes_most", c_int64), ("alone_bytes", c_int64),
        ("peer_bytes", c_int64), ("one_path_bytes", c_int64), ("batch_bytes", c_int64),
        ("kernel_in_bytes", c_int64), ("kernel_out_bytes", c_int64), ("border_bytes", c_int64),
        ("depth", c_int32), ("longest_first", c_int32), ("direct_pieces_most", c_int32),
        ("relay_pieces_most", c_int32),
        ("stall_s", c_double), ("pause_s", c_double), ("slow", c_double), ("poll_s", c_double),
        ("spin_s", c_double), ("rest_s", c_double),
    )  # fmt: skip


class RelayView(ctypes.Structure):
    """`RelayShape` of cuda_links.h."""

    _fields_ = (
        ("ctas", c_int32), ("threads", c_int32), ("stages", c_int32), ("stage_bytes", c_int32),
        ("recall_poll_bytes", c_int32),
    )  # fmt: skip


class CountsView(ctypes.Structure):
    """`LinkCounts` of schedule.h."""

    _fields_ = tuple((name, c_int64) for name in COUNTS)


class PieceView(ctypes.Structure):
    """`Piece` of schedule.h."""

    _fields_ = (("target", c_uint64), ("source", c_uint64), ("size", c_uint64))


class TaskView(ctypes.Structure):
    """`TaskView` of called_links.h."""

    _fields_ = (
        ("link", c_int32), ("port", c_int32), ("slot", c_int32), ("relayed", c_int32),
        ("recalled", c_int32), ("given_up", c_int32), ("size", c_int64), ("pieces", c_int64),
        ("piece", POINTER(PieceView)),
    )  # fmt: skip


TaskFunction = ctypes.CFUNCTYPE(c_int, POINTER(TaskView))
MarkFunction = ctypes.CFUNCTYPE(c_int, c_void_p)
CopyFunction = ctypes.CFUNCTYPE(c_int, c_int, c_int64, POINTER(PieceView))


class LinkFunctions(ctypes.Structure):
    """`LinkFunctions` of called_links.h."""

    _fields_ = (
        ("start", TaskFunction), ("is_over", TaskFunction), ("recall", TaskFunction),
        ("is_harmless", TaskFunction), ("is_passed", MarkFunction), ("copy", CopyFunction),
    )  # fmt: skip


class _PortName(ctypes.Structure):
    _fields_ = (("gpu", c_int32), ("direction", c_int32), ("source", c_int32))


class Machine(ctypes.Structure):
    """`Machine` of api.cpp."""

    _fields_ = (
        ("ports", POINTER(_PortName)), ("relays", POINTER(c_int32)),
        ("port_count", c_int32), ("relay_count", c_int32),
    )  # fmt: skip


class Result(ctypes.Structure):
    """A pointer, or null and what kind of error it is."""

    _fields_ = (("value", c_void_p), ("error", c_int))


_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "error": (c_char_p, ()),
    "open": (
        Result,
        (POINTER(Machine), POINTER(SettingsView), c_char_p, POINTER(c_void_p), c_char_p,
         POINTER(RelayView), POINTER(RelayView)),
    ),
    "open_called": (
        Result, (POINTER(Machine), POINTER(SettingsView), POINTER(LinkFunctions), c_int),
    ),
    "stop": (c_int, (c_void_p, c_double)),
    "delete": (None, (c_void_p,)),
    "submit": (Result, (c_void_p, c_void_p, c_int64, c_void_p, c_int, c_int)),
    "wait": (c_int, (c_void_p, c_void_p, c_double, c_int)),
    "cancel": (None, (c_void_p, c_void_p)),
    "follow": (c_int, (c_void_p, c_void_p, c_void_p, c_int)),
    "state": (c_int, (c_void_p,)),
    "moved": (c_int64, (c_void_p,)),
    "channel_bytes": (c_int64, ()),
    "connect": (c_int, (c_void_p, c_int, c_void_p)),
    "disconnect": (None, (c_void_p, c_int)),
    "share": (None, (c_void_p, c_int, c_uint64, c_uint64, c_uint64)),
    "unshare": (None, (c_void_p, c_int, c_uint64)),
    "fault": (c_char_p, (c_void_p,)),
    "free": (None, (c_void_p,)),
    "counts": (None, (c_void_p, c_int, POINTER(CountsView))),
    "incident": (c_int, (c_void_p, c_char_p, c_int64)),
    "turn": (None, (c_void_p, c_double)),
    "due": (c_double, (c_void_p, c_double)),
    "outstanding": (c_int, (c_void_p, c_int, POINTER(TaskView), c_int)),
    "relay_stream": (c_void_p, (c_void_p, c_int, c_int)),
}  # fmt: skip


_RELAYS: dict[str, tuple[object, tuple[object, ...]]] = {
    "open": (Result, (c_void_p, c_char_p, c_void_p, c_void_p, c_int64)),
    "close": (None, (c_void_p, c_void_p)),
    "streaming": (None, (c_void_p, c_int)),
    "count": (c_int64, (c_void_p,)),
}  # fmt: skip


@cache
def library() -> ctypes.CDLL:
    """Load the library. Raises `KernelsMissing` with the command that builds it.

    Its functions release the interpreter's lock.
    """
    path = LIBRARY_FOLDER / _FILE
    if not path.exists():
        raise KernelsMissing(
            f"the transfer engine is not built ({_FILE} is missing);"
            " run: python -m c2cserve.kernels.build"
        )
    loaded = ctypes.CDLL(str(path))
    named = {f"c2c_transfers_{name}": one for name, one in _SIGNATURES.items()}
    named |= {f"c2c_relays_{name}": one for name, one in _RELAYS.items()}
    for name, (result, arguments) in named.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    return loaded


def machine_of(ports: Sequence[Port], relays: Sequence[tuple[int, int]]) -> Machine:
    """Return what the library is told of a machine. `relays` are as `moves.ports_of` has them."""
    names = [_PortName(one.gpu, _DIRECTIONS.index(one.direction), one.source) for one in ports]
    flat = array("i", [place for pair in relays for place in pair])
    return Machine(
        (_PortName * len(names))(*names), (c_int32 * len(flat))(*flat), len(names), len(relays)
    )


def view_of(settings: Settings) -> SettingsView:
    return SettingsView(
        settings.task_bytes, settings.task_bytes_most, settings.alone_bytes,
        settings.peer_bytes, settings.one_path_bytes, settings.batch_bytes,
        settings.kernel_in_bytes, settings.kernel_out_bytes, settings.border_bytes, settings.depth,
        settings.order == "longest", _PIECES_MOST, _PIECES_MOST, settings.stall_s,
        settings.pause_s, settings.slow, settings.poll_s, settings.spin_s,
        settings.rest_s,
    )  # fmt: skip


def relay_view_of(relay: RelayShape, threads: int) -> RelayView:
    return RelayView(relay.ctas, threads, relay.stages, relay.stage_bytes, relay.recall_poll_bytes)
