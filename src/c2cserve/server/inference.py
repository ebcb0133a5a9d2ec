"""Inference behind every door: run choices, stream or gather them, report how it went."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from c2cserve.core.model import name_of
from c2cserve.runtime.gateway import Gateway, Refused
from c2cserve.server.access.gate import Lease
from c2cserve.server.choices import ChoicePiece, ChoiceStream
from c2cserve.server.dashboard.live import TickTap
from c2cserve.server.disconnect import EventStream, unless_disconnected
from c2cserve.server.doors.door import Answer, Door, Writer
from c2cserve.server.errors import ApiError
from c2cserve.server.metrics import Metrics
from c2cserve.server.prepare import Prepared

log = logging.getLogger(__name__)


class Inference:
    def __init__(self, gateway: Gateway, metrics: Metrics, tap: TickTap) -> None:
        self._gateway = gateway
        self._metrics = metrics
        self._tap = tap

    async def answer(
        self, http: HttpRequest, door: Door, prepared: Prepared, request_id: str, lease: Lease
    ) -> Response:
        """Run the choices of a request and answer it as `door` does. `lease` is closed when the
        last choice has ended."""
        choices = [ChoiceStream(i, job, prepared) for i, job in enumerate(prepared.jobs)]
        answer = Answer(prepared, choices, request_id, lease)
        writer, pieces = door(answer), self._pieces(answer)
        if prepared.asked.stream:
            return await self._stream(http, writer, answer, pieces)
        return await self._gather(http, writer, answer, pieces)

    # ---- running choices ------------------------------------------------------------------------

    async def _pieces(self, answer: Answer) -> AsyncGenerator[ChoicePiece, None]:
        """Yield pieces of all choices as they arrive. At the end, of any kind, every choice is
        ended, counted and logged."""
        choices = {one.job.request.id: one for one in answer.choices}
        prepared_s, left = time.monotonic(), len(choices)
        for one in answer.choices:
            one.prepared_s = prepared_s
        try:
            async with aclosing(self._gateway.submit(answer.prepared.jobs)) as deltas:
                while left:
                    delta = await anext(deltas)
                    choice = choices[delta.request_id]
                    if choice.finish:
                        continue  # it has ended with a stop string
                    piece = choice.add(delta)
                    answer.lease.produced(piece.tokens)
                    left -= piece.finish is not None
                    if left and piece.finish is not None and delta.finish is None:
                        self._gateway.cancel(delta.request_id)
                    yield piece
        except Refused as refused:
            for one in answer.choices:
                if not one.finish:
                    one.finish, one.error = "refused", refused.reason
            raise
        finally:
            for one in answer.choices:
                one.finish = one.finish or "abort"
            answer.lease.close(answer.prepared, answer.choices)
            self._note(answer)

    def _note(self, answer: Answer) -> None:
        now = time.monotonic()
        for choice in answer.choices:
            self._metrics.ended(choice, now)
            request, timing = choice.job.request, choice.timing
            self._tap.answered(request.id, timing, choice.output_tokens)
            first_s = choice.first_s
            log.log(
                logging.WARNING if choice.finish == "error" else logging.INFO,
                "%s: %d prompt and %d output tokens, %s%s",
                name_of(request.model), request.prompt_len, choice.output_tokens, choice.finish,
                f" ({choice.error})" if choice.error else "",
                extra={
                    "request_id": answer.request_id, "job": request.id,
                    "model": name_of(request.model), "key": answer.lease.key.name or None,
                    "prompt_tokens": request.prompt_len, "cached_tokens": choice.cached_tokens,
                    "output_tokens": choice.output_tokens, "finish": choice.finish,
                    "ttft_ms": first_s and round((first_s - request.arrival_s) * 1e3, 3),
                    "ttft_parts_ms": choice.ttft_parts_ms(),
                    "total_ms": round((now - request.arrival_s) * 1e3, 3),
                    "slice": timing and timing.slice, "switched": timing and timing.switched,
                },
            )  # fmt: skip

    # ---- streamed -------------------------------------------------------------------------------

    async def _stream(
        self, http: HttpRequest, writer: Writer, answer: Answer,
        pieces: AsyncGenerator[ChoicePiece, None],
    ) -> Response:  # fmt: skip
        """Stream the answer. The status is sent only after the first piece, so that a refusal can
        still be a 429."""
        first = await unless_disconnected(http.receive, _first(pieces))
        if first is None:
            return Response(status_code=499)  # the client is gone
        headers = {"cache-control": "no-cache", **_timing_headers(answer.choices)}
        parts = self._parts(writer, first, pieces, scored=answer.scored)
        return EventStream(parts, headers=headers, media_type=writer.media_type)

    async def _parts(
        self, writer: Writer, first: ChoicePiece, pieces: AsyncGenerator[ChoicePiece, None], *,
        scored: bool,
    ) -> AsyncGenerator[bytes, None]:  # fmt: skip
        try:
            # A scored prompt has alternatives for each token: a thread keeps the event loop free.
            yield await asyncio.to_thread(writer.begin, first) if scored else writer.begin(first)
            async for piece in pieces:
                if part := writer.add(piece):
                    yield part
            yield writer.end()
        except ApiError as error:
            yield writer.fail(error)
        except Refused as refused:
            yield writer.fail(ApiError.of(refused))
        finally:
            await pieces.aclose()

    # ---- in one piece ---------------------------------------------------------------------------

    async def _gather(
        self, http: HttpRequest, writer: Writer, answer: Answer,
        pieces: AsyncGenerator[ChoicePiece, None],
    ) -> Response:  # fmt: skip
        by_choice = await unless_disconnected(http.receive, _all(pieces))
        if by_choice is None:
            return Response(status_code=499)  # the client is gone
        if answer.scored:
            content = await asyncio.to_thread(writer.whole, by_choice)
        else:
            content = writer.whole(by_choice)
        headers = _timing_headers(answer.choices)
        return Response(content, 200, headers, media_type="application/json")


async def _all(pieces: AsyncGenerator[ChoicePiece, None]) -> dict[int, list[ChoicePiece]]:
    gathered: dict[int, list[ChoicePiece]] = {}
    async with aclosing(pieces):
        async for piece in pieces:
            gathered.setdefault(piece.index, []).append(piece)
    return gathered


async def _first(pieces: AsyncGenerator[ChoicePiece, None]) -> ChoicePiece:
    return await anext(pieces)


def _timing_headers(choices: Sequence[ChoiceStream]) -> dict[str, str]:
    """Return headers about where a choice ran and the time of its switch. A stream's headers are
    sent before all choices have begun, so they describe the first one that has."""
    timing = next((one.timing for one in choices if one.timing is not None), None)
    if timing is None:
        return {}
    return {
        "x-c2cserve-slice": timing.slice,
        "x-c2cserve-switched": "true" if timing.switched else "false",
        "x-c2cserve-switch-ms": f"{timing.switch_s * 1e3:.3f}",
        "x-c2cserve-queue-ms": f"{timing.queue_s * 1e3:.3f}",
    }
