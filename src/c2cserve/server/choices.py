"""One choice of an answer: deltas in, text out, with everything a response reports of it."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from c2cserve.core.request import Delta, FinishReason, Job, Timing, TokenLogprob
from c2cserve.runtime.gateway import Gateway
from c2cserve.server.errors import ApiError
from c2cserve.server.prepare import Prepared
from c2cserve.server.tokenizer import Detokenizer, StopStrings


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of a choice; the last one has `finish`."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None


class Choice:
    """Runs one job. `pieces` may be closed early: the job is cancelled then."""

    def __init__(self, index: int, job: Job, prepared: Prepared) -> None:
        self.index = index
        self.job = job
        self.prompt = prepared.prompts[index // prepared.n]
        self.output_tokens = 0
        self.cached_tokens = 0
        self.timing: Timing | None = None
        self.finish = ""
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._detokenizer = Detokenizer(prepared.tokenizer, list(job.tokens))
        self._stops = StopStrings(prepared.stops)

    async def pieces(self, gateway: Gateway) -> AsyncGenerator[Piece, None]:
        """Raises `Refused` first thing if the job is not taken, ApiError (500) if it fails."""
        deltas = gateway.submit(self.job)
        try:
            async for delta in deltas:
                piece = self._piece(delta)
                yield piece
                if piece.finish is not None:
                    return
        finally:
            # Closing it before its end (a stop string, a client gone) frees the job's memory.
            await deltas.aclose()
            self.finish = self.finish or "cancelled"

    def _piece(self, delta: Delta) -> Piece:
        if delta.timing is not None:
            self.timing = delta.timing
            self.cached_tokens = delta.cached_tokens
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish is FinishReason.ERROR:
            self.finish = "error"
            raise ApiError(500, f"the model failed: {delta.error}")
        if delta.tokens:
            self.last_s = time.monotonic()
            self.first_s = self.first_s or self.last_s
            self.output_tokens += len(delta.tokens)
        stopped_by_token = delta.finish is FinishReason.STOP
        visible = delta.tokens[:-1] if stopped_by_token else delta.tokens
        text, stopped = self._stops.add(self._detokenizer.add(visible))
        finish: str | None = None
        if stopped:
            finish = "stop"
        elif delta.finish is not None:
            rest, stopped = self._stops.add(self._detokenizer.finish())
            text += rest if stopped else rest + self._stops.finish()
            finish = "stop" if stopped else delta.finish.value
        self.finish = finish or ""
        logprobs = delta.logprobs[: len(visible)] if stopped_by_token else delta.logprobs
        return Piece(self.index, text, logprobs, finish)
