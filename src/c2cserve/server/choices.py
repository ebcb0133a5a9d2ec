"""One choice of an answer: deltas in, text out, and all that a response reports of it."""

import time
from dataclasses import dataclass
from itertools import pairwise

from c2cserve.core.request import Delta, FinishReason, Job, Timing, TokenLogprob
from c2cserve.server.errors import ApiError
from c2cserve.server.prepare import Prepared
from c2cserve.server.text.detokenize import Detokenizer, StopStrings
from c2cserve.server.text.vocabulary import TokenizerError

_PARTS = ("unread", "prepare", "queue", "slice", "hand_out")
"""Parts of the time to a first token. They end when the server has read the request, and when it
is tokenized. The next two end when the controller sends it, and has its first token. The last ends
when the event loop has that."""


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """New output of a choice; the last one has `finish`."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    offsets: tuple[int, ...] = ()
    """Where the text of each token of `logprobs` begins in the output, in characters."""
    ends: bool = False
    """The last token of `logprobs` is the end token, which adds no text."""
    finish: str | None = None
    tokens: int = 0
    """Output tokens in this piece, as `usage` counts them."""


class ChoiceStream:
    """Runs one job and turns its deltas into text. Closing `pieces` before the end cancels the
    job."""

    def __init__(self, index: int, job: Job, prepared: Prepared) -> None:
        self.index = index
        self.job = job
        self.prompt = prepared.prompts[index // prepared.asked.n]
        self.output_tokens = 0
        self.cached_tokens = 0
        self.timing: Timing | None = None
        self.finish = ""
        self.error = ""
        """Why it failed or was refused."""
        self.read_s = prepared.read_s
        self.prepared_s = 0.0
        """When it was handed to the gateway."""
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.gaps_s: list[float] = []
        """Times between deltas with tokens, seconds."""
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._hidden = prepared.asked.no_output
        self._decoded = 0
        """Characters decoded so far, stop strings included."""
        reading = prepared.asked.reading
        vocabulary = prepared.vocabulary
        shown = vocabulary if reading is None else vocabulary.showing(reading.marks)
        self._detokenizer = Detokenizer(shown, job.tokens)
        self._stops = StopStrings(prepared.asked.stops)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output, None if another reason did."""
        return self._stops.found or None

    def add(self, delta: Delta) -> ChoicePiece:
        """Return what a delta shows. Raises ApiError (500) if the choice fails."""
        try:
            return self._piece(delta)
        except TokenizerError as error:
            self.finish, self.error = "error", str(error)
            raise ApiError(500, f"the output cannot be shown: {error}") from error

    def ttft_parts_ms(self) -> dict[str, float]:
        """Return where the time to the first token went, if there was one: parts that add up."""
        timing, arrival_s = self.timing, self.job.request.arrival_s
        if self.first_s is None or timing is None:
            return {}
        times = (
            arrival_s, self.read_s, self.prepared_s, arrival_s + timing.wait_s,
            arrival_s + timing.report_s, self.first_s,
        )  # fmt: skip
        return {
            name: round((until - since) * 1e3, 3)
            for name, (since, until) in zip(_PARTS, pairwise(times), strict=True)
        }

    def _piece(self, delta: Delta) -> ChoicePiece:
        if delta.timing is not None:
            self.timing = delta.timing
            self.cached_tokens = delta.cached_tokens
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish is FinishReason.ERROR:
            self.finish, self.error = "error", delta.error
            raise ApiError(500, f"the model failed: {delta.error}")
        if delta.tokens:
            now = time.monotonic()
            if self.last_s is None:
                self.first_s = now
            else:
                self.gaps_s.append(now - self.last_s)
            self.last_s = now
        if self._hidden:
            self.finish = FinishReason.LENGTH.value
            return ChoicePiece(self.index, "", finish=self.finish)
        hidden = delta.finish is FinishReason.STOP
        text, offsets, stopped = self._read(delta.tokens[:-1] if hidden else delta.tokens)
        # Tokens that an engine sampled beyond a stop string are neither shown nor counted.
        count = len(offsets) if stopped else len(delta.tokens)
        ends = hidden and not stopped
        if ends:
            offsets = (*offsets, self._decoded)
        self.output_tokens += count
        finish: str | None = None
        if stopped:
            finish = "stop"
        elif delta.finish is not None:
            rest = self._detokenizer.finish()
            if self.job.sampling.grammar is not None and delta.finish is FinishReason.LENGTH:
                rest = rest.rstrip("\N{REPLACEMENT CHARACTER}")  # half a character fits no grammar
            rest, stopped = self._stops.add(rest)
            text += rest if stopped else rest + self._stops.finish()
            finish = "stop" if stopped else delta.finish.value
        self.finish = finish or ""
        logprobs = delta.logprobs[: len(offsets)]
        return ChoicePiece(self.index, text, logprobs, offsets, ends, finish, count)

    def _read(self, tokens: tuple[int, ...]) -> tuple[str, tuple[int, ...], bool]:
        """Return the text to show, where each token up to a stop string begins, and whether there
        was a stop string."""
        if self.job.sampling.logprobs is None and not self._stops:
            text = self._detokenizer.add(tokens)
            self._decoded += len(text)
            return text, (), False
        offsets: list[int] = []
        shown: list[str] = []
        for token in tokens:
            offsets.append(self._decoded)
            text = self._detokenizer.add((token,))
            self._decoded += len(text)
            text, stopped = self._stops.add(text)
            shown.append(text)
            if stopped:
                return "".join(shown), tuple(offsets), True
        return "".join(shown), tuple(offsets), False
