"""The kinds of requests: a table of what is sent how often, and which statuses it may get.

A new kind is a function that makes a case from a `Sampler`, and a line of `KINDS`. Statuses that
only a moment allows (a model being removed, no slice up) are the judge's affair.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from soak.case import CHAT, COMPLETIONS, Case, Leave
from soak.catalogue import Model

_BLOCK = 16
CALM_PROMPT = 8
"""Tokens of the longest prompt that a calm model is asked."""


@dataclass(frozen=True, slots=True)
class Limits:
    output: int
    """Tokens of the longest answers."""
    prompt: int
    """And of the longest prompts, where the model's context is longer."""


class Sampler:
    """One request's dice: of one model, by one generator."""

    def __init__(self, rng: random.Random, model: Model, limits: Limits, families: int) -> None:
        """`families`: how many prefixes of a model are shared by many prompts."""
        self.rng, self.model, self.limits = rng, model, limits
        self.context = min(model.context, limits.prompt)
        self._families = families

    def length(self, low: int, high: int) -> int:
        """Of a prompt, short ones more often: log-uniform."""
        high = max(low, min(high, self.context - 1))
        return min(high, int(low * (high / low) ** self.rng.random() + 0.5))

    def output(self, most: int | None = None) -> int:
        most = min(most or self.limits.output, self.limits.output)
        return max(1, int(most ** self.rng.random() + 0.5))

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, self.model.vocab) for _ in range(count)]

    def prefix(self, count: int) -> list[int]:
        """The first tokens of what a family of prompts begins with."""
        family = self.rng.randrange(self._families)
        rng = random.Random(f"{self.model.id} family {family}")
        return [rng.randrange(3, self.model.vocab) for _ in range(count)]

    def case(self, kind: str, prompt: object, lens: Sequence[int], **more: Any) -> Case:
        """A greedy completion, unless `more` (fields of the body) says otherwise."""
        body: dict[str, Any] = {
            "model": self.model.id, "prompt": prompt, "temperature": 0, **more,
        }  # fmt: skip
        room = self.model.context - max(lens, default=0)
        body["max_tokens"] = max(1, min(room, body.get("max_tokens") or self.output()))
        if not self.model.numbers:
            body.setdefault("ignore_eos", self.rng.random() < 0.7)
        if self.rng.random() < 0.6:
            body["stream"] = True
            if self.rng.random() < 0.7:
                body["stream_options"] = {"include_usage": True}
        return Case("", kind, self.model, COMPLETIONS, body, frozenset({200}), {}, tuple(lens))

    def simple(self, kind: str, length: int, **more: Any) -> Case:
        """Of random tokens."""
        return self.case(kind, self.tokens(length), (length,), **more)


Make = Callable[[Sampler, str], Case]


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    make: Make
    weight: float
    size: str = "any"
    """`short` or `long`: moods ask for one of them."""
    fits: Callable[[Model], bool] = lambda _: True


# ---- answers that can be checked -----------------------------------------------------------------


def _short(sampler: Sampler, kind: str) -> Case:
    return sampler.simple(kind, sampler.length(1, _BLOCK), logprobs=0)


def calm(sampler: Sampler, kind: str) -> Case:
    """For models whose steps are to stay small: bits must not change whatever others do."""
    more: dict[str, Any] = {"logprobs": 0} if sampler.rng.random() < 0.8 else {}
    length = 1 if sampler.rng.random() < 0.6 else sampler.rng.randint(2, CALM_PROMPT)
    return sampler.simple(kind, length, **more)


def _medium(sampler: Sampler, kind: str) -> Case:
    return sampler.simple(kind, sampler.length(_BLOCK, 512), logprobs=0)


def _whole(sampler: Sampler, kind: str) -> Case:
    """The prompt leaves room for a few tokens, or for one."""
    left = sampler.rng.choice((1, 1, 2, 17, 64))
    length = max(1, sampler.context - left)
    most = sampler.rng.choice((1, left, left))
    return sampler.simple(kind, length, max_tokens=min(most, sampler.limits.output), logprobs=0)


def _long_answer(sampler: Sampler, kind: str) -> Case:
    most = sampler.limits.output
    return sampler.simple(
        kind, sampler.length(1, 64), max_tokens=sampler.rng.randint(most // 2, most)
    )


def _edge(sampler: Sampler, kind: str) -> Case:
    """Just below, at or above a border: of blocks, graphs, GEMM kernels, steps."""
    border = sampler.rng.choice((16, 32, 64, 64, 128, 256, 512, 1024, 2048))
    length = min(border + sampler.rng.randint(-1, 1), sampler.context - 40)
    return sampler.simple(kind, max(1, length), max_tokens=sampler.output(32), logprobs=0)


def _shared(sampler: Sampler, kind: str) -> Case:
    """Begins like others of its family; where it parts from them is anywhere, or at a block."""
    shared = sampler.length(_BLOCK, 400)
    if sampler.rng.random() < 0.5:
        shared = max(_BLOCK, shared // _BLOCK * _BLOCK)
    prompt = sampler.prefix(min(shared, sampler.context - 64)) + sampler.tokens(
        sampler.rng.choice((0, 1, 1, 9))
    )
    return sampler.case(kind, prompt, (len(prompt),), logprobs=0)


def _several(sampler: Sampler, kind: str) -> Case:
    count = sampler.rng.choice((2, 2, 3, 5, 8))
    length = sampler.length(1, 200)
    seed = sampler.rng.getrandbits(40)
    return sampler.simple(kind, length, n=count, temperature=0.8, seed=seed,
                       max_tokens=sampler.output(32), logprobs=0)  # fmt: skip


def _batch(sampler: Sampler, kind: str) -> Case:
    """Several prompts in one request."""
    lens = [sampler.length(1, 100) for _ in range(sampler.rng.randint(2, 6))]
    prompts = [sampler.tokens(length) for length in lens]
    return sampler.case(kind, prompts, lens, max_tokens=sampler.output(24), logprobs=0)


def _stops(sampler: Sampler, kind: str) -> Case:
    if sampler.model.numbers:
        stop = [str(sampler.rng.randrange(10, 100)) for _ in range(sampler.rng.randint(1, 4))]
    else:
        stop = [
            sampler.rng.choice("abcdefghij0123456789 ") for _ in range(sampler.rng.randint(1, 4))
        ]
    more: dict[str, Any] = {"temperature": 0.9, "seed": sampler.rng.getrandbits(40)}
    return sampler.simple(kind, sampler.length(1, 100), stop=stop, **more)


def _stop_ids(sampler: Sampler, kind: str) -> Case:
    ids = [sampler.rng.randrange(sampler.model.vocab) for _ in range(sampler.model.vocab // 40)][
        :64
    ]
    least = min(sampler.rng.choice((0, 0, 1)), sampler.limits.output)
    return sampler.simple(kind, sampler.length(1, 100), stop_token_ids=ids, temperature=1.0,
                       seed=sampler.rng.getrandbits(40), min_tokens=least)  # fmt: skip


def _sampled(sampler: Sampler, kind: str) -> Case:
    more: dict[str, Any] = {"temperature": sampler.rng.choice((0.2, 0.7, 1.0, 1.9))}
    for name, values in (("top_p", (0.3, 0.95)), ("top_k", (1, 5, 50)), ("min_p", (0.05, 0.5))):
        if sampler.rng.random() < 0.4:
            more[name] = sampler.rng.choice(values)
    return sampler.simple(
        kind, sampler.length(1, 200), seed=sampler.rng.getrandbits(62), logprobs=0, **more
    )


def _penalised(sampler: Sampler, kind: str) -> Case:
    """Rows that the CPU's sampler draws."""
    bias = {
        str(sampler.rng.randrange(sampler.model.vocab)): sampler.rng.choice((-100, -5, 3))
        for _ in "123"
    }
    return sampler.simple(
        kind, sampler.length(1, 200), repetition_penalty=1.3, presence_penalty=0.5,
        frequency_penalty=-0.2, logit_bias=bias, max_tokens=sampler.output(48),
    )  # fmt: skip


def _alternatives(sampler: Sampler, kind: str) -> Case:
    return sampler.simple(kind, sampler.length(1, 200), logprobs=sampler.rng.choice((1, 5, 20)),
                       max_tokens=sampler.output(48))  # fmt: skip


def _echoed(sampler: Sampler, kind: str) -> Case:
    """The prompt's own log-probabilities; nothing of it may come from the cache."""
    length, logprobs = sampler.length(2, 600), sampler.rng.choice((0, 1))
    return sampler.simple(kind, length, echo=True, logprobs=logprobs, max_tokens=sampler.output(24))


def _text(sampler: Sampler, kind: str) -> Case:
    """What the specialists were trained on, as text."""
    letters = "".join(sampler.rng.choice("abcdefgh") for _ in range(sampler.rng.randint(1, 40)))
    prompt = sampler.rng.choice(
        (f"sort: {letters} =>", f"reverse: {letters} =>", "347+86=", letters)
    )
    return sampler.case(kind, prompt, (), max_tokens=sampler.output(200), ignore_eos=True)


def _chat(sampler: Sampler, kind: str) -> Case:
    turns = [{"role": "user", "content": f"what is your name, {sampler.rng.randrange(99)}?"}]
    if sampler.rng.random() < 0.3:
        turns = [{"role": "system", "content": "be brief"}, *turns]
    made = sampler.case(kind, "", (), max_tokens=sampler.output(120), ignore_eos=True)
    body = {name: value for name, value in made.body.items() if name != "prompt"}
    body["messages"] = turns
    if sampler.rng.random() < 0.5:
        body |= {"logprobs": True, "top_logprobs": sampler.rng.choice((0, 2))}
    return Case("", kind, sampler.model, CHAT, body, made.allowed)


# ---- answers of which only the form is known ---------------------------------------------------


def _unseeded(sampler: Sampler, kind: str) -> Case:
    return sampler.simple(kind, sampler.length(1, 300), temperature=1.0)


def _hasty(sampler: Sampler, kind: str) -> Case:
    """Wants its first token sooner than it may be possible."""
    made = sampler.simple(kind, sampler.length(1, 600), priority=sampler.rng.randint(-100, 100))
    target_ms = sampler.rng.choice((0.01, 1, 20, 200))
    headers = {"x-slo-ttft-ms": str(target_ms), "x-slo-tpot-ms": sampler.rng.choice(("1", "50"))}
    return Case("", kind, sampler.model, made.path, made.body, frozenset({200, 429}), headers,
                made.prompt_lens)  # fmt: skip


def _leaving(sampler: Sampler, kind: str) -> Case:
    """Goes away in the middle of a stream, or before anything has come."""
    most = sampler.limits.output
    length = min(sampler.length(1, 700), sampler.context - most)
    made = sampler.simple(kind, length, max_tokens=most, logprobs=0)
    if sampler.rng.random() < 0.5:
        made.body["stream"] = True
        leave = Leave(pieces=sampler.rng.randint(1, sampler.limits.output // 2))
    else:
        leave = Leave(after_s=sampler.rng.choice((0.0005, 0.005, 0.05, 0.5)))
    return Case("", kind, sampler.model, made.path, made.body, frozenset({200}), {},
                made.prompt_lens, leave)  # fmt: skip


# ---- refusals ----------------------------------------------------------------------------------


def _refused(made: Case, status: int, code: str | None) -> Case:
    return Case("", made.kind, made.model, made.path, made.body, frozenset({status}), made.headers,
                made.prompt_lens, None, code)  # fmt: skip


def _unknown_field(sampler: Sampler, kind: str) -> Case:
    return _refused(sampler.simple(kind, 3, no_such_field=1), 400, "unsupported_parameter")


def _too_long(sampler: Sampler, kind: str) -> Case:
    length = sampler.model.context + sampler.rng.choice((0, 1, 500))
    return _refused(sampler.simple(kind, length, max_tokens=1), 400, "context_length_exceeded")


def _unknown_token(sampler: Sampler, kind: str) -> Case:
    prompt = [sampler.model.vocab + sampler.rng.choice((0, 1, 1 << 20))]
    return _refused(sampler.case(kind, prompt, (1,)), 400, None)


def _unknown_model(sampler: Sampler, kind: str) -> Case:
    made = sampler.simple(kind, 3)
    body = {**made.body, "model": f"no-such-model-{sampler.rng.randrange(10)}"}
    return Case("", kind, None, made.path, body, frozenset({404}), {}, (), None, "model_not_found")


def _of_text(model: Model) -> bool:
    return not model.numbers


KINDS = (
    Kind("short", _short, 10, "short"),
    Kind("medium", _medium, 8),
    Kind("whole context", _whole, 2, "long"),
    Kind("long answer", _long_answer, 3, "long"),
    Kind("edge", _edge, 5),
    Kind("shared prefix", _shared, 8),
    Kind("several choices", _several, 3),
    Kind("batch", _batch, 2),
    Kind("stop strings", _stops, 3, "short"),
    Kind("stop ids", _stop_ids, 2, "short"),
    Kind("sampled", _sampled, 5, "short"),
    Kind("penalised", _penalised, 2, "short"),
    Kind("alternatives", _alternatives, 2, "short"),
    Kind("echoed", _echoed, 2),
    Kind("text", _text, 10, "short", _of_text),
    Kind("chat", _chat, 6, "short", lambda model: model.chats),
    Kind("unseeded", _unseeded, 1),
    Kind("hasty", _hasty, 2),
    Kind("leaving", _leaving, 5),
    Kind("unknown field", _unknown_field, 0.4, "short"),
    Kind("too long", _too_long, 0.4),
    Kind("unknown token", _unknown_token, 0.4, "short"),
    Kind("unknown model", _unknown_model, 0.4, "short"),
)
CALM = Kind("calm", calm, 0, "short")
BANK = ("short", "medium", "edge", "shared prefix", "several choices", "stop strings", "sampled",
        "penalised", "text", "chat")  # fmt: skip
"""Kinds of the questions that are asked alone at the start, and then again and again."""
