"""The copies of whole models, by the transfer engine (`engine.gpu.weight_loads`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from c2cserve.engine.gpu.weight_loads import LoadCopy
from c2cserve.transfer.engine import Ticket, TransferEngine
from c2cserve.transfer.moves import HOST, Segment
from c2cserve.transfer.notifier import TicketNotifier
from c2cserve.transfer.settings import Urgency


@dataclass(frozen=True, slots=True)
class _Moving:
    """The end of a transfer; `memory.peer_pool.Mark`."""

    engine: TransferEngine
    ticket: Ticket

    def synchronize(self) -> None:
        self.engine.wait(self.ticket, spins=False)


class LoadTransfers:
    """An `engine.gpu.weight_loads.LoadCopies`."""

    def __init__(
        self, engine: TransferEngine, device: torch.device, lanes: Sequence[torch.cuda.Stream],
        notify: Callable[[], None], gpu_of: Callable[[int], int],
    ) -> None:  # fmt: skip
        """`lanes` are the streams of the slice's lanes, the resident lane's first.

        `notify` is called from another thread at the end of each transfer. `gpu_of` tells which GPU
        has an address of lent memory.
        """
        assert device.index is not None
        self._engine = engine
        self._device: int = device.index
        self._lanes = lanes
        self._gpu_of = gpu_of
        self._notifier = TicketNotifier(engine, notify)
        self._tickets: list[Ticket] = []
        """Those that were not over when they were last looked at."""

    def submit(self, copies: Sequence[LoadCopy]) -> Ticket:
        # Of another lane's steps, only those count that read weights which were dropped. The
        # resident lane waits for these (`engine.gpu.lanes.LaneFence`).
        segments = [
            Segment(one.target, one.source, one.size, self._device, self._source_of(one))
            for one in copies
        ]
        ticket = self._engine.submit(segments, self._lanes[0], urgency=Urgency.LOAD)
        self._tickets = [one for one in self._tickets if not self._engine.poll(one)]
        self._tickets.append(ticket)
        self._notifier.watch(ticket)
        return ticket

    def _source_of(self, copy: LoadCopy) -> int:
        if copy.home == "host":
            return HOST
        return self._device if copy.home == "hbm" else self._gpu_of(copy.source)

    def is_over(self, ticket: Ticket) -> bool:
        return self._engine.poll(ticket)

    def moved_bytes(self, ticket: Ticket) -> int:
        return self._engine.moved_bytes(ticket)

    def cancel(self, ticket: Ticket) -> None:
        self._engine.cancel(ticket)

    def hold_steps(self, ticket: Ticket) -> None:
        for lane in self._lanes:
            self._engine.follow(ticket, lane)

    def synchronize(self) -> None:
        for mark in self.marks():
            mark.synchronize()

    def marks(self) -> list[_Moving]:
        """Return the ends of all transfers under way."""
        return [_Moving(self._engine, one) for one in self._tickets]
