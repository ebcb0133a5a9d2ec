"""Whether answers say what the model says alone: to the bit where that is promised, else scored
again.

CPU slices promise bits always (docs/models.md, Batch invariance). GPU slices promise them where no
step was of more than 64 rows, no prompt was cut so that one token was left, and nothing was
computed twice (docs/gpu_engine.md, Precision). That is made sure of for calm models. For others the
answer's tokens are given to the model as a prompt, and their log-probabilities must be what the
answer said of them, within `catalogue_client.TOLERANCE`.
"""

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from catalogue_client import TOLERANCE, rms

from soak.case import COMPLETIONS, Case, Reply, Said
from soak.client import Client
from soak.findings import Findings
from soak.judge import Judge, output_logprobs
from soak.moments import Moments

EXACT_ROWS = 64
"""Of a step: above, GPU slices multiply by cuBLAS, whose sums depend on the number of rows."""
_UNCUT_ROWS = 16
"""The smallest budget of a step for prompts: so many tokens together are never cut. Nor does a
block of such a prompt come from the cache."""
_EXACT_KINDS = ("calm", "at the end")
"""What is drawn on GPUs, all rows of a step by the same sampler."""
_SCORED_TOKENS = 1500
"""Of prompt and answer, beyond which scoring an answer again takes too long."""


@dataclass(slots=True)
class Asked:
    """A case with its reply, and the load it met."""

    case: Case
    reply: Reply
    rows: int = 0
    """Of its model's requests at a time, at most: no step had more."""


class Checker:
    def __init__(
        self, findings: Findings, judge: Judge, moments: Moments, rng: random.Random, gpu: bool
    ) -> None:  # fmt: skip
        self._findings, self._judge, self._moments = findings, judge, moments
        self._rng, self._gpu = rng, gpu
        self._alone: dict[str, Reply] = {}
        self._number = 0
        self._layout = ""

    def now_on(self, layout: str) -> None:
        """Slices of another size may sum in another order: on GPUs what they say is compared with
        what they say alone."""
        self._layout = layout if self._gpu else ""

    def promised(self, asked: Asked) -> bool:
        """Whether the answer must be what the model says alone, to the bit."""
        case = asked.case
        if not case.deterministic or case.model is None:
            return False
        if not self._gpu:
            return True
        if case.kind not in _EXACT_KINDS or asked.rows > EXACT_ROWS:
            return False
        uncut = case.prompt_lens == (1,) or asked.rows <= _UNCUT_ROWS
        return uncut and self._moments.calm(asked.reply.sent_s, asked.reply.ended_s)

    # ---- asking alone ---------------------------------------------------------------------------

    async def ask_alone(self, client: Client, case: Case) -> Reply | None:
        """The reference of the case's question, asked now if there is none. The server must be
        idle. None: it has no good answer, which is a violation by then."""
        key = self._layout + case.question
        if key not in self._alone:
            reply = await self._ask(client, case)
            if reply is None:
                return None
            self._alone[key] = reply
        return self._alone[key]

    async def _ask(self, client: Client, case: Case) -> Reply | None:
        self._number += 1
        body = {n: v for n, v in case.body.items() if n not in ("stream", "stream_options")}
        if case.model is not None:
            body["model"] = case.model.same_as
        alone = replace(
            case, id=f"alone-{self._number}", body=body, leave=None, headers={},
            kind="alone" if case.kind != "scored again" else case.kind, allowed=frozenset({200}),
        )  # fmt: skip
        reply = await client.ask(alone)
        return reply if self._judge.judge(alone, reply) and reply.complete else None

    # ---- checking -------------------------------------------------------------------------------

    async def check(self, client: Client, asked: Iterable[Asked], until_s: float) -> None:
        """As many as there is time for, in random order; all of those with references."""
        usable = [one for one in asked if one.reply.status == 200 and one.reply.choices]
        self._rng.shuffle(usable)
        for one in usable:
            promised, late = self.promised(one), time.monotonic() > until_s
            known = promised and self._layout + one.case.question in self._alone
            if late and not known:
                self._findings.checks["not checked, for want of time"] += 1
            elif promised:
                await self._exact(client, one)
            elif (answer := _scorable(one)) is not None:
                await self._score(client, one, answer)
            else:
                self._findings.checks["form only"] += 1

    async def _exact(self, client: Client, one: Asked) -> None:
        alone = await self.ask_alone(client, one.case)
        if alone is None:
            return
        self._findings.checks["compared to the bit"] += 1
        wrong = _difference(one.reply, alone)
        if wrong is None:
            return
        again = await self._ask(client, one.case)
        stable = again is not None and _difference(again, alone) is None
        name = "bits" if stable else "bits (nor is the model alone equal to itself)"
        self._findings.violation(name, alone.shown(), wrong, one.case, one.reply)

    async def _score(self, client: Client, one: Asked, answer: list[int]) -> None:
        case, said = one.case, one.reply.choices[0]
        assert case.model is not None
        given = [*case.body["prompt"], *answer]
        values = output_logprobs(case, said)[: len(answer)] if said.logprobs else []
        body = {
            "model": case.model.id, "prompt": given, "max_tokens": 1, "temperature": 0,
            "echo": True, "logprobs": 0 if values else 1,
        }  # fmt: skip
        scoring = Case("", "scored again", case.model, COMPLETIONS, body, frozenset({200}), {},
                       (len(given),))  # fmt: skip
        reply = await self._ask(client, scoring)
        if reply is None:
            return
        scored = reply.choices[0]
        begin, end = len(given) - len(answer), len(given)
        found = [one or 0.0 for one in scored.logprobs[begin:end]]
        if values:
            apart = rms([value or 0.0 for value in values], found)
        else:  # a greedy answer: how far each token is from the likeliest one
            best = [max(top.values()) for top in scored.tops[begin:end]]
            apart = rms(found, best)
        self._findings.checks["scored again"] += 1
        if apart > TOLERANCE:
            expected = f"log-probabilities within {TOLERANCE} nats (rms) of {found}"
            self._findings.violation("an answer scored again", expected, apart, case, one.reply)


def _scorable(one: Asked) -> list[int] | None:
    """Tokens of an answer that can be scored again."""
    case, said = one.case, one.reply.choices.get(0)
    plain = not {"logit_bias", "repetition_penalty", "echo"} & set(case.body)
    if said is None or case.model is None or not case.model.numbers or not plain:
        return None
    if len(case.prompt_lens) != 1 or not isinstance(case.body["prompt"][0], int):
        return None
    greedy = case.body.get("temperature") == 0
    if said.logprobs:
        words = said.tokens
    elif greedy and "stop" not in case.body:
        words = said.text.split()
    else:
        return None
    fits = case.prompt_lens[0] + len(words) <= min(_SCORED_TOKENS, case.model.context - 1)
    return [int(word) for word in words] if fits and words else None


def _difference(reply: Reply, alone: Reply) -> object:
    """Where an answer, or the part of one that came, is not the reference; None: nowhere."""
    for index, said in sorted(reply.choices.items()):
        true = alone.choices.get(index)
        if true is None:
            return f"choice {index} is not there alone"
        if (wrong := _said_difference(said, true, whole=reply.complete)) is not None:
            return f"choice {index}: {wrong}"
    return None


def _said_difference(said: Said, true: Said, *, whole: bool) -> str | None:
    text, values = true.text, true.logprobs
    if not whole:
        text, values = text[: len(said.text)], values[: len(said.logprobs)]
    if said.text != text:
        return f"text parts after {_common(said.text, text)} characters"
    if said.logprobs != values:
        return f"log-probabilities part after {_common(said.logprobs, values)} tokens"
    if whole and said.finishes != true.finishes:
        return f"finish {said.finishes}, not {true.finishes}"
    return None


def _common(these: Sequence[object], those: Sequence[object]) -> int:
    pairs = zip(these, those, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(these), len(those)))
