"""A connection whose requests may be refused as soon as they are read."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from c2cserve.server.shedding.arrival import ArrivalClock, descriptor
from c2cserve.server.shedding.heads import Caller
from c2cserve.server.shedding.shedder import LET_IN, LoadShedder


class SheddingProtocol(HttpToolsProtocol):
    """uvicorn's protocol. What is refused in an overload gets no task and reaches no route. If its
    head is that of a refusal before, it is not even parsed."""

    shedder: LoadShedder
    clock: ArrivalClock

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._held: tuple[Any, Any] | None = None
        """uvicorn's cycle and application of the request that is being read. It is started when
        all that has arrived of it is read: by then it may be refused."""
        self._descriptor = -1
        self._piece = b""
        """What is being parsed, if a request begins with it."""
        self._judged: bytes | None = None
        """What the load shedder says of the request in `_piece`."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._descriptor = descriptor(transport)

    def _arrived_s(self) -> float:
        return self.clock.arrived_s(self._descriptor)

    def _refused_unparsed(self, data: bytes) -> bool:
        """Refuse the request in `data` if it is a whole one with a known head. Return whether it
        was refused. Called between two requests; if it was not, `data` is parsed next."""
        if not self.shedder.active or (known := self.shedder.heads.find(data)) is None:
            return False
        answer = self.shedder.judge(known.caller, known.body, self._arrived_s(), known.id)
        if not answer:
            self._judged = answer
            return False
        self.server_state.total_requests += 1
        self._write_refusal(answer, closes=known.caller.closes)
        return True

    def _shed(self) -> None:
        """Answer a request that was read as a whole and is refused; start others."""
        cycle: Any = self.cycle
        if self._held is not None and not cycle.waiting_for_100_continue and self.shedder.active:
            state, caller = cycle.scope["state"], None
            answer, self._judged = self._judged, None
            if answer is None:
                caller = self.shedder.caller(cycle.scope, closes=not cycle.keep_alive)
            if caller is not None:
                answer = self.shedder.judge(caller, bytes(cycle.body), state["arrived_s"])
            state["let_in"] = answer == LET_IN
            if answer and caller is not None:
                self._held = None
                self._end_refused(cycle, answer, caller)
        self._start_held()

    def _end_refused(self, cycle: Any, answer: bytes, caller: Caller) -> None:
        self.shedder.heads.hold(caller, self._piece, len(cycle.body))
        self._write_refusal(answer, closes=caller.closes)
        cycle.response_started = cycle.response_complete = True
        self.on_response_complete()

    def _write_refusal(self, answer: bytes, *, closes: bool) -> None:
        own = b"connection: close\r\n" if closes else b""
        common = self.shedder.common(self.server_state.default_headers)
        self.transport.write(STATUS_LINE[429] + own + common + answer)
        if closes:
            self.transport.close()

    def _start_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            super()._start_asgi_task(*held)
