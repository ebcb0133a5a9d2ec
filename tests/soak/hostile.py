"""Clients that mean harm beside the honest ones: wrong values in every field, megabytes, bodies
that do not end, sockets that say nothing. None of them may get what only a broken server answers,
and what the honest ones get is judged as ever.

An attack is a function that does it and reports, and a line of `ATTACKS`.
"""

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from hostile_requests import NO_REQUESTS, completion, costly, is_json, upgrade
from mutations import Mutations
from raw_http import post

from soak.catalogue import Model
from soak.findings import Findings
from soak.judge import Judge, error_faults
from soak.raw import Answer, connected, exchange

ALLOWED = frozenset({200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 431})
"""Of docs/api.md, all that a client can bring about."""
_CLOSED = 0
_RELATED = {
    "max_tokens": {"max_completion_tokens", "min_tokens", "prompt", "messages"},
    "max_completion_tokens": {"max_tokens", "min_tokens", "messages"},
    "min_tokens": {"max_tokens", "max_completion_tokens"},
    "best_of": {"n"}, "n": {"best_of", "prompt"},
    "top_logprobs": {"logprobs"}, "logprobs": {"top_logprobs"},
    "stream": {"stream_options"}, "prompt": {"messages"},
}  # fmt: skip
"""Fields that may be named instead of the wrong one: they contradict each other."""
_CHOICES_MOST = 256
_SHOWN_BYTES = 2000
_PAUSE_S = 0.15
_FINISHED = re.compile(rb'"finish_reason": ?"')


@dataclass(frozen=True, slots=True)
class Sent:
    """What an attack sent, and what it may get."""

    data: bytes
    allowed: frozenset[int] = ALLOWED
    field: str | None = None
    """That its error must name when it is 400; None: any."""


class Hostile:
    """Of one phase: so many attackers at a time, until told to finish."""

    def __init__(
        self, url: str, models: Sequence[Model], judge: Judge, findings: Findings,
        rng: random.Random, end_s: float,
    ) -> None:  # fmt: skip
        """They ask for models that are not kept to small steps. `end_s`: within which any of them
        must have an answer."""
        self.url, self.rng = url, rng
        self._judge, self._findings, self._end_s = judge, findings, end_s
        self.model = next(model.id for model in models if model.id == "sorter-llama")
        self.mutations = Mutations(rng.getrandbits(32))
        self.costly = costly(self.model)
        self.one_costly = asyncio.Semaphore(1)
        self._over = False

    async def run(self, attackers: int) -> None:
        await asyncio.gather(*(self._attack() for _ in range(attackers)))

    async def finish(self, running: "asyncio.Task[None]") -> None:
        """End `run`, whose task is given, when the attacks under way are over. What it failed of is
        raised."""
        self._over = True
        await running

    async def _attack(self) -> None:
        weights = [weight for _, weight, _ in ATTACKS]
        while not self._over:
            await asyncio.sleep(self.rng.expovariate(1 / _PAUSE_S))
            name, _, attack = self.rng.choices(ATTACKS, weights)[0]
            self._findings.events[f"attack: {name}"] += 1
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(self._end_s):
                    await attack(self, name)
            except TimeoutError:
                came = f"none after {time.monotonic() - began_s:.0f} s"
                self._findings.violation(f"attack: {name}", "an answer", came)
            except OSError as error:
                if not self._judge.draining:
                    self._findings.violation(f"attack: {name}", "a connection", repr(error))

    # ---- judging --------------------------------------------------------------------------------

    def good(self, **fields: object) -> bytes:
        return completion(self.model, prompt="sort: dcba", temperature=0, **fields)

    async def ask(self, name: str, sent: Sent) -> Answer:
        answer = await exchange(self.url, sent.data)
        self.judge(name, sent, answer)
        return answer

    def left(self, choices: int) -> None:
        """So many were asked for by a client that did not stay to see them end."""
        self._judge.tally.left += choices

    def judge(self, name: str, sent: Sent, answer: Answer) -> None:
        self._findings.requests[f"attack: {name}: {answer.status}"] += 1
        self._judge.tally.left += choices_of(sent, answer)
        for what, expected, came in self._faults(sent, answer):
            shown = {
                "came": came, "sent": _shown(sent.data), "answer": _shown(answer.body),
                "headers": answer.headers, "seconds": answer.ended_s - answer.sent_s,
            }  # fmt: skip
            self._findings.violation(f"attack: {name}: {what}", expected, shown)

    def _faults(self, sent: Sent, answer: Answer) -> list[tuple[str, object, object]]:
        path = [*sent.data.split(b" ", 2), b""][1]
        moment = self._judge.of_the_moment(None, answer.sent_s, answer.ended_s)
        allowed = set(sent.allowed) | moment
        if path == b"/ready":
            allowed.add(503)
        return faults_of(sent, answer, allowed, probe=path in (b"/health", b"/ready"))


def faults_of(
    sent: Sent, answer: Answer, allowed: set[int], *, probe: bool = False
) -> list[tuple[str, object, object]]:  # fmt: skip
    """`probe`: an answer that has its body whatever the status."""
    if answer.status not in allowed:
        return [("status", sorted(allowed), answer.status)]
    if answer.status == _CLOSED:
        return []
    if not answer.whole:
        return [("an answer's end", "a whole answer", f"{len(answer.body)} bytes")]
    faults: list[tuple[str, object, object]] = []
    if not answer.headers.get("x-request-id"):
        faults.append(("x-request-id", "some", None))
    if answer.status < 400 or probe or sent.data.startswith(b"HEAD "):
        return faults
    faults += error_faults(answer.status, answer.error, answer.headers)
    if not faults and answer.status == 400 and sent.field is not None:
        named = str(answer.error["param"]).split(".")[0]
        fields = {sent.field} | _RELATED.get(sent.field, set())
        if named not in fields:
            faults.append(("an error's field", sorted(fields), answer.error))
    return faults


def choices_of(sent: Sent, answer: Answer) -> int:
    """That the server may have counted, at most."""
    if answer.status != 200 or b"completions" not in sent.data[:64]:
        return 0 if answer.status else _CHOICES_MOST
    return len(_FINISHED.findall(answer.body)) if answer.whole else _CHOICES_MOST


def _shown(data: bytes) -> str:
    cut = f"... ({len(data)} bytes)" if len(data) > _SHOWN_BYTES else ""
    return repr(data[:_SHOWN_BYTES]) + cut


# ---- attacks -------------------------------------------------------------------------------------


async def _wrong_field(at: Hostile, name: str) -> None:
    path, field, body = at.mutations.wrong_field()
    named = field if is_json(body) else None
    await at.ask(name, Sent(post(path, body.encode("utf-8", "surrogatepass")), field=named))


async def _mutated(at: Hostile, name: str) -> None:
    await at.ask(name, Sent(at.mutations.request()))


async def _costly(at: Hostile, name: str) -> None:
    kind = at.rng.choice(sorted(at.costly))
    data, status, field = at.costly[kind]
    async with at.one_costly:
        await at.ask(f"{name}, {kind}", Sent(data, frozenset({status, 429}), field))


async def _no_request(at: Hostile, name: str) -> None:
    data = at.rng.choice(NO_REQUESTS)
    await at.ask(name, Sent(data, frozenset({400, 404, 405, 413})))


async def _cut_body(at: Hostile, name: str) -> None:
    """Of a length that is not the body's: JSON that ends early, or a client that does."""
    head, _, body = at.good().partition(b"\r\n\r\n")
    part = body[: at.rng.randrange(len(body))]
    if at.rng.random() < 0.5:
        await at.ask(name, Sent(post("/v1/completions", part), frozenset({400})))
        return
    sent = Sent(head + b"\r\n\r\n" + part, frozenset({_CLOSED, 400}))
    async with connected(at.url) as connection:
        await connection.send(sent.data)
        if at.rng.random() < 0.5:
            connection.reset()
            return
        connection.send_end()
        at.judge(name, sent, await connection.answer())


async def _slow_body(at: Hostile, name: str) -> None:
    """A part at a time: in time, or so that it never ends."""
    head, _, body = at.good(max_tokens=2).partition(b"\r\n\r\n")
    ends = at.rng.random() < 0.7
    size = 16 if ends else 1
    sent = Sent(head + b"\r\n\r\n" + body, frozenset({200, 408, 429} if ends else {408}))
    async with connected(at.url) as connection:
        await connection.send(head + b"\r\n\r\n")
        answering = asyncio.create_task(connection.answer())
        rest = body if ends else body[:-1]
        while rest and not answering.done():
            await connection.send(rest[:size])
            rest = rest[size:]
            await asyncio.sleep(0.1)
        at.judge(name, sent, await answering)


async def _idle_sockets(at: Hostile, _: str) -> None:
    begun = at.rng.choice((b"", b"POST /v1/completions HTTP/1.1\r\nx: "))
    async with AsyncExitStack() as stack:
        for _socket in range(at.rng.randint(5, 60)):
            connection = await stack.enter_async_context(connected(at.url))
            if begun:
                await connection.send(begun)
        await asyncio.sleep(at.rng.uniform(0.2, 3.0))


async def _takes_nothing(at: Hostile, _: str) -> None:
    """Asks for megabytes and reads none of them."""
    data = at.good(max_tokens=60, n=32, logprobs=20, stream=True, ignore_eos=True)
    async with connected(at.url, window=4096) as connection:
        await connection.send(data)
        await asyncio.sleep(at.rng.uniform(0.1, 2.0))
        connection.reset()
    at.left(32)


async def _upgrade(at: Hostile, name: str) -> None:
    fields = upgrade(at.rng.choice(("websocket", "h2c")))
    data = at.rng.choice(
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", at.good(max_tokens=2))
    )
    await at.ask(name, Sent(data.replace(b"host: localhost\r\n", b"host: localhost\r\n" + fields)))


async def _pipelined(at: Hostile, name: str) -> None:
    """Many requests before the first answer; perhaps none of the answers is read."""
    sent = Sent(at.good(max_tokens=2), frozenset({200, 429}))
    count = at.rng.randint(2, 20)
    async with connected(at.url) as connection:
        sending = asyncio.create_task(connection.send(sent.data * count))
        if at.rng.random() < 0.3:
            await sending
            connection.reset()
            at.left(count)
            return
        for _ in range(count):
            at.judge(name, sent, await connection.answer())
        await sending


async def _biases(at: Hostile, name: str) -> None:
    """Keys of `logit_bias` that are no token ids, and some that are none of this model."""
    key = at.rng.choice(("1" * 5000, "-1", "4294967296", "99999999", "1.5", "", "\0", "٣", "0x1"))
    data = at.good(max_tokens=1, logit_bias={key: 1, "5": at.rng.choice((100, -100))})
    await at.ask(name, Sent(data, frozenset({400, 429}), "logit_bias"))


Attack = Callable[[Hostile, str], Awaitable[None]]

ATTACKS: tuple[tuple[str, float, Attack], ...] = (
    ("one wrong field", 8, _wrong_field),
    ("mutated", 8, _mutated),
    ("costly", 1, _costly),
    ("no request", 2, _no_request),
    ("cut body", 2, _cut_body),
    ("slow body", 1, _slow_body),
    ("idle sockets", 0.5, _idle_sockets),
    ("takes nothing", 0.5, _takes_nothing),
    ("upgrade", 1, _upgrade),
    ("pipelined", 1, _pipelined),
    ("biases", 1, _biases),
)
"""Names, weights, and what is done."""
