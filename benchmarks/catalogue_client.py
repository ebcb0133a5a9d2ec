"""Asking a catalogue's models over HTTP, and comparing what they say."""

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import aiohttp

_ANSWER_S = 180.0
TOLERANCE = 0.1
"""Nats, of the root mean square of an answer's log-probabilities against another's: other kernels
for other batches round otherwise (hundredths); another model's weights make 0.3."""


class AnswerFailed(RuntimeError):
    """The server refused, failed, or broke off."""


@dataclass(frozen=True, slots=True)
class Question:
    model: str
    shape: str
    prompt: tuple[int, ...]
    tokens: int


@dataclass(slots=True)
class Answer:
    question: Question
    text: str = ""
    logprobs: list[float] = field(default_factory=list[float])
    arrivals_s: list[float] = field(default_factory=list[float])
    """Since the request was sent."""
    slice: str = ""
    switched: bool = False
    switch_s: float = 0.0
    queue_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0]

    @property
    def first_step_s(self) -> float:
        """What of the time to the first token is neither queue nor switch: weights streamed, the
        prompt computed, and the way here."""
        return max(0.0, self.ttft_s - self.queue_s - self.switch_s)

    @property
    def tpot_s(self) -> float | None:
        gaps = len(self.arrivals_s) - 1
        return (self.arrivals_s[-1] - self.ttft_s) / gaps if gaps > 0 else None


def question(model: str, shape: str, vocab: int, length: int, tokens: int, salt: str) -> Question:
    """Token ids drawn by model and salt: the same again for the same."""
    rng = random.Random(f"{model} {salt}")
    return Question(model, shape, tuple(rng.randrange(vocab) for _ in range(length)), tokens)


class Client:
    """One connection pool; within `async with`."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> "Client":
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        self._session = aiohttp.ClientSession(self._url, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(
        self, asked: Question, at: int = 0, then: Callable[[Answer], Awaitable[None]] | None = None
    ) -> Answer:
        """Greedy, streamed. `then` is called once `at` tokens are here. Raises `AnswerFailed`."""
        body = {
            "model": asked.model, "prompt": list(asked.prompt), "max_tokens": asked.tokens,
            "temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 0,
        }  # fmt: skip
        answer = Answer(asked)
        began_s = time.perf_counter()
        try:
            async with self._session.post("/v1/completions", json=body) as response:
                if response.status != 200:
                    raise AnswerFailed(f"{asked.model}: {response.status} {await response.text()}")
                _take_headers(answer, response.headers)
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        _take(answer, json.loads(line[6:]), time.perf_counter() - began_s)
                        if then is not None and len(answer.logprobs) >= at:
                            reached, then = then, None
                            await reached(answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AnswerFailed(f"{asked.model}: {type(error).__name__}: {error}") from error
        if len(answer.logprobs) != asked.tokens:
            raise AnswerFailed(
                f"{asked.model}: {len(answer.logprobs)} tokens of {asked.tokens} came"
            )
        return answer

    async def ask_all(
        self, questions: Sequence[Question], at_once: int, until_s: float
    ) -> list[Answer]:
        """In this order, so many at a time; those that would begin after `until_s` (monotonic) are
        left out."""
        limit = asyncio.Semaphore(at_once)

        async def one(asked: Question) -> Answer | None:
            async with limit:
                return await self.ask(asked) if time.monotonic() < until_s else None

        found = await asyncio.gather(*map(one, questions))
        return [answer for answer in found if answer is not None]


def _take_headers(answer: Answer, headers: Any) -> None:
    answer.slice = headers["x-c2cserve-slice"]
    answer.switched = headers["x-c2cserve-switched"] == "true"
    answer.switch_s = float(headers["x-c2cserve-switch-ms"]) / 1e3
    answer.queue_s = float(headers["x-c2cserve-queue-ms"]) / 1e3


def _take(answer: Answer, chunk: dict[str, Any], now_s: float) -> None:
    if "error" in chunk:
        raise AnswerFailed(f"{answer.question.model}: {chunk['error']['message']}")
    choice = chunk["choices"][0]
    answer.text += choice["text"]
    values = (choice["logprobs"] or {}).get("token_logprobs", [])
    answer.logprobs += values
    answer.arrivals_s += [now_s] * len(values)


# ---- comparing ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Compared:
    """Answers against the same model's, asked alone."""

    answers: int = 0
    equal: int = 0
    """Same text, log-probabilities within the tolerance."""
    bit_equal: int = 0
    """Log-probabilities the same to the last bit."""
    largest_rms: float = 0.0
    wrong: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def add(self, answer: Answer, alone: Answer) -> None:
        """`alone` may go on for longer."""
        count = len(answer.logprobs)
        words = alone.text.split()[:count]
        apart = rms(answer.logprobs, alone.logprobs[:count])
        same_text = answer.text.split() == words
        self.answers += 1
        self.bit_equal += same_text and answer.logprobs == alone.logprobs[:count]
        self.largest_rms = max(self.largest_rms, apart)
        if same_text and apart <= TOLERANCE:
            self.equal += 1
        else:
            self.wrong.append(
                {"model": answer.question.model, "prompt": len(answer.question.prompt),
                 "text": answer.text, "alone": " ".join(words), "rms": apart}
            )  # fmt: skip

    def summary(self) -> dict[str, Any]:
        return {
            "answers": self.answers, "equal": self.equal, "bit_equal": self.bit_equal,
            "largest_rms": self.largest_rms, "wrong": self.wrong[:20],
        }  # fmt: skip


def rms(values: Sequence[float], others: Sequence[float]) -> float:
    """Root mean square of the differences; infinite if there are not as many of both."""
    if len(values) != len(others) or not values:
        return math.inf
    return math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(values, others)) / len(values))  # noqa: B905


def phases(answers: Sequence[Answer]) -> dict[str, Any]:
    """Where the time went: p50 and p99 of each phase, seconds."""
    parts = {
        "ttft_s": [one.ttft_s for one in answers],
        "queue_s": [one.queue_s for one in answers],
        "switch_s": [one.switch_s for one in answers if one.switched],
        "first_step_s": [one.first_step_s for one in answers],
        "tpot_s": [one.tpot_s for one in answers if one.tpot_s is not None],
    }
    spreads = {name: _spread(values) for name, values in parts.items() if values}
    return {"answers": len(answers), "switched": sum(a.switched for a in answers), **spreads}


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": median(ordered), "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]}
