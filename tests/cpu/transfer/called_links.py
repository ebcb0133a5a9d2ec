"""The native engine on links that are Python: tests copy bytes when and in the order they like."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Protocol

from c2cserve.transfer import library as native
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.library import LinkFunctions, TaskView, machine_of, view_of
from c2cserve.transfer.moves import Port, ports_of
from c2cserve.transfer.settings import Settings

PIECES_MOST = 3
"""Pieces of a micro-task."""


class LinkFault(Exception):
    """An error of a link, for the engine."""


@dataclass(frozen=True)
class Piece:
    target: int
    source: int
    size: int


@dataclass(frozen=True)
class Task:
    """A micro-task, as it is on its link now. Equal are those of one link and slot."""

    link: Port
    port: Port
    slot: int
    relayed: bool
    recalled: bool
    size: int
    pieces: tuple[Piece, ...]

    @property
    def key(self) -> tuple[Port, int]:
        return self.link, self.slot


class Carrier(Protocol):
    """What a test has to have. All of it may raise `LinkFault`."""

    def start(self, task: Task) -> None: ...

    def is_over(self, task: Task) -> bool: ...

    def recall(self, task: Task) -> None: ...

    def is_harmless(self, task: Task) -> bool: ...

    def is_passed(self, stream: int) -> bool: ...

    def copy(self, pieces: Sequence[Piece]) -> None: ...


class CalledEngine(TransferEngine):
    """With what only tests ask of it."""

    def __init__(self, gpus: int, settings: Settings, carrier: Carrier, *, threaded: bool) -> None:
        self.ports, relays = ports_of(range(gpus), permutations(range(gpus), 2))
        self._functions = self._functions_of(carrier)
        view = view_of(settings)
        view.direct_pieces_most = view.relay_pieces_most = PIECES_MOST
        super().__init__(
            self.ports,
            lambda: native.library().c2c_transfers_open_called(
                machine_of(self.ports, relays), view, self._functions, threaded
            ),
        )

    def _functions_of(self, carrier: Carrier) -> LinkFunctions:
        def on_task(function: object) -> object:
            def call(view: "ctypes._Pointer[TaskView]") -> int:
                try:
                    return int(bool(function(self._task(view.contents))))  # type: ignore[operator]
                except LinkFault:
                    return -1

            return native.TaskFunction(call)

        return LinkFunctions(
            on_task(carrier.start), on_task(carrier.is_over), on_task(carrier.recall),
            on_task(carrier.is_harmless),
            native.MarkFunction(lambda stream: int(carrier.is_passed(stream or 0))),
            native.CopyFunction(lambda port, n, pieces: carrier.copy(_pieces(pieces, n)) or 0),
        )  # fmt: skip

    def _task(self, view: TaskView) -> Task:
        return Task(
            self.ports[view.link], self.ports[view.port], view.slot, bool(view.relayed),
            bool(view.recalled), view.size, _pieces(view.piece, view.pieces),
        )  # fmt: skip

    def turn(self, now_s: float) -> None:
        self._library.c2c_transfers_turn(self._native(), now_s)

    def due(self, now_s: float) -> float:
        return self._library.c2c_transfers_due(self._native(), now_s)

    def outstanding(self, port: Port) -> list[Task]:
        views = (TaskView * 64)()
        link = self.ports.index(port)
        count = self._library.c2c_transfers_outstanding(self._native(), link, views, len(views))
        return [self._task(view) for view in views[:count]]


def _pieces(pieces: "ctypes._Pointer[native.PieceView]", count: int) -> tuple[Piece, ...]:
    return tuple(Piece(one.target, one.source, one.size) for one in pieces[:count])
