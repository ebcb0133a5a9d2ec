"""The two inference endpoints: run choices, stream or gather them, report how it went."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from c2cserve.core.model import name_of
from c2cserve.runtime.gateway import Gateway, Refused
from c2cserve.server.access.gate import Lease
from c2cserve.server.choices import ChoicePiece, ChoiceStream
from c2cserve.server.disconnect import EventStream, unless_disconnected
from c2cserve.server.errors import ApiError
from c2cserve.server.metrics import Metrics
from c2cserve.server.prepare import Prepared
from c2cserve.server.shapes import (
    Envelope,
    chat_chunk,
    chat_logprobs,
    choice_usage,
    completion_logprobs,
    text_chunk,
    token_offsets,
    usage,
)
from c2cserve.server.text.messages import Asked
from c2cserve.server.tools.readings import Readings

log = logging.getLogger(__name__)
_json = msgspec.json.Encoder()


@dataclass(slots=True)
class _Answer:
    """One request in flight."""

    prepared: Prepared
    choices: list[ChoiceStream]
    envelope: Envelope
    request_id: str
    lease: Lease

    @property
    def asked(self) -> Asked:
        return self.prepared.asked

    @property
    def echo(self) -> bool:
        return self.asked.echo

    @property
    def scored(self) -> bool:
        """Whether the prompt's tokens get log-probabilities too."""
        return self.asked.sampling.prompt_logprobs is not None


class Inference:
    def __init__(self, gateway: Gateway, metrics: Metrics, fingerprint: str) -> None:
        self._gateway = gateway
        self._metrics = metrics
        self._fingerprint = fingerprint

    async def answer(
        self, http: HttpRequest, prepared: Prepared, request_id: str, lease: Lease
    ) -> Response:
        """Run the choices of a request and answer it. `lease` is closed when the last one has
        ended."""
        asked = prepared.asked
        choices = [ChoiceStream(i, job, prepared) for i, job in enumerate(prepared.jobs)]
        first = prepared.jobs[0].request.id
        envelope = Envelope.new(first, asked, self._fingerprint)
        answer = _Answer(prepared, choices, envelope, request_id, lease)
        pieces = self._pieces(answer)
        if asked.stream:
            return await self._stream(http, answer, pieces)
        return await self._gather(http, answer, pieces)

    # ---- running choices ------------------------------------------------------------------------

    async def _pieces(self, answer: _Answer) -> AsyncGenerator[ChoicePiece, None]:
        """Yield pieces of all choices as they arrive. At the end, of any kind, every choice is
        ended, counted and logged."""
        alone = len(answer.choices) == 1
        merged = _of(answer.choices[0], self._gateway) if alone else self._merged(answer.choices)
        try:
            async with aclosing(merged) as pieces:
                async for piece in pieces:
                    answer.lease.produced(piece.tokens)
                    yield piece
        finally:
            answer.lease.close(answer.prepared, answer.choices)
            self._note(answer)

    async def _merged(self, choices: Sequence[ChoiceStream]) -> AsyncGenerator[ChoicePiece, None]:
        queue: asyncio.Queue[ChoicePiece | Exception] = asyncio.Queue()

        async def pump(choice: ChoiceStream) -> None:
            try:
                async with aclosing(_of(choice, self._gateway)) as pieces:
                    async for piece in pieces:
                        queue.put_nowait(piece)
            except (Refused, ApiError) as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(pump(choice)) for choice in choices]
        try:
            left = len(choices)
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                left -= item.finish is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _note(self, answer: _Answer) -> None:
        now = time.monotonic()
        for choice in answer.choices:
            self._metrics.ended(choice, now)
            request, timing = choice.job.request, choice.timing
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
        self, http: HttpRequest, answer: _Answer, pieces: AsyncGenerator[ChoicePiece, None]
    ) -> Response:
        """Stream the answer. The status is sent only after the first piece, so that a refusal can
        still be a 429."""
        first = await unless_disconnected(http.receive, _first(pieces))
        if first is None:
            return Response(status_code=499)  # the client is gone
        headers = {"cache-control": "no-cache", **_timing_headers(answer.choices)}
        return EventStream(self._events(answer, first, pieces), headers=headers)

    async def _events(
        self, answer: _Answer, first: ChoicePiece, pieces: AsyncGenerator[ChoicePiece, None]
    ) -> AsyncGenerator[bytes, None]:
        with_usage, counts = answer.asked.include_usage, answer.asked.continuous_usage
        shaper = (_CountingShaper if counts else _Shaper)(answer)
        try:
            if answer.scored:
                yield await asyncio.to_thread(lambda: _event(shaper.chunk(first)))
            else:
                yield _event(shaper.chunk(first))
            async for piece in pieces:
                if piece.text or piece.finish or piece.logprobs:
                    if content := shaper.chunk(piece):
                        yield _event(content)
                elif counts:
                    shaper.skip(piece)
            if with_usage:
                last = answer.envelope.wrap([])
                last["usage"] = usage(answer.choices, len(answer.prepared.prompts))
                yield _event(last)
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body())
        except Refused as refused:
            yield _event(ApiError.of(refused).body())
        finally:
            await pieces.aclose()

    # ---- in one piece ---------------------------------------------------------------------------

    async def _gather(
        self, http: HttpRequest, answer: _Answer, pieces: AsyncGenerator[ChoicePiece, None]
    ) -> Response:
        by_choice = await unless_disconnected(http.receive, _all(pieces))
        if by_choice is None:
            return Response(status_code=499)  # the client is gone

        def shaped() -> bytes:
            shaper = _Shaper(answer)
            choices = [shaper.whole(choice, by_choice[choice.index]) for choice in answer.choices]
            content = answer.envelope.wrap(choices)
            content["usage"] = usage(answer.choices, len(answer.prepared.prompts))
            return _json.encode(content)

        # A scored prompt has alternatives for each token: a thread keeps the event loop free.
        content = await asyncio.to_thread(shaped) if answer.scored else shaped()
        headers = _timing_headers(answer.choices)
        return Response(content, 200, headers, media_type="application/json")


async def _of(choice: ChoiceStream, gateway: Gateway) -> AsyncGenerator[ChoicePiece, None]:
    async with aclosing(choice.pieces(gateway)) as pieces:
        async for piece in pieces:
            yield piece


async def _all(pieces: AsyncGenerator[ChoicePiece, None]) -> dict[int, list[ChoicePiece]]:
    gathered: dict[int, list[ChoicePiece]] = {}
    async with aclosing(pieces):
        async for piece in pieces:
            gathered.setdefault(piece.index, []).append(piece)
    return gathered


async def _first(pieces: AsyncGenerator[ChoicePiece, None]) -> ChoicePiece:
    return await anext(pieces)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + _json.encode(content) + b"\n\n"


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


class _Shaper:
    """Turns the pieces of one answer into chunks or whole choices."""

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer
        self._started: set[int] = set()
        plan = answer.asked.reading
        self._readings = None if plan is None else Readings(plan)

    def skip(self, piece: ChoicePiece) -> None:
        """Note a piece that has nothing to show."""

    def chunk(self, piece: ChoicePiece) -> dict[str, Any]:
        """Return the chunk of a piece; empty if its text is held until it is known what it is."""
        first = piece.index not in self._started
        self._started.add(piece.index)
        if self._answer.envelope.chat:
            logprobs = self._logprobs([piece])
            if self._readings is None:
                choice = chat_chunk(piece, logprobs, first=first)
            else:
                choice = self._readings.chunk(piece, logprobs, first=first)
                if not (choice["delta"] or piece.finish or logprobs):
                    return {}
        else:
            choice = text_chunk(piece, self._logprobs([piece], first))
            if first and self._answer.echo:
                choice["text"] = self._answer.choices[piece.index].prompt.text + choice["text"]
        content = self._answer.envelope.wrap([choice])
        if self._answer.asked.include_usage:
            content["usage"] = None
        return content

    def whole(self, choice: ChoiceStream, pieces: Sequence[ChoicePiece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        shaped = {
            "index": choice.index, "finish_reason": pieces[-1].finish,
            "logprobs": self._logprobs(pieces, True),
        }  # fmt: skip
        if self._readings is not None:
            return {**shaped, **self._readings.whole(text, pieces[-1].finish)}
        if self._answer.envelope.chat:
            return {**shaped, "message": {"role": "assistant", "content": text, "refusal": None}}
        return {**shaped, "text": (choice.prompt.text if self._answer.echo else "") + text}

    def _logprobs(
        self, pieces: Sequence[ChoicePiece], first: bool = False
    ) -> dict[str, Any] | None:
        choice = self._answer.choices[pieces[0].index]
        if choice.job.sampling.logprobs is None:
            return None
        vocabulary = self._answer.prepared.vocabulary
        entries = [entry for piece in pieces for entry in piece.logprobs]
        if self._answer.envelope.chat:
            return chat_logprobs(vocabulary, entries)
        before = len(choice.prompt.text) if self._answer.echo else 0
        offsets = [before + offset for piece in pieces for offset in piece.offsets]
        if not (first and self._answer.echo):
            return completion_logprobs(vocabulary, entries, offsets)
        prompt = choice.job.tokens
        offsets = [*token_offsets(vocabulary, prompt)[1:], *offsets]
        return completion_logprobs(
            vocabulary, [*choice.prompt_logprobs, *entries], offsets, unscored=prompt[0]
        )


class _CountingShaper(_Shaper):
    """Adds to each chunk the usage of its choice so far."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__(answer)
        self._tokens = [0] * len(answer.choices)
        """Output tokens of each choice. A choice itself may be ahead of its chunks."""

    def skip(self, piece: ChoicePiece) -> None:
        self._tokens[piece.index] += piece.tokens

    def chunk(self, piece: ChoicePiece) -> dict[str, Any]:
        self.skip(piece)
        choice = self._answer.choices[piece.index]
        content = super().chunk(piece)
        if content:
            content["usage"] = choice_usage(choice, self._tokens[piece.index])
        return content
