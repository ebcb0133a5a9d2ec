"""Turning a request's body into an engine's input: validate, render, tokenize, check limits.

These are pure functions of a body and a tokenizer. Their cost grows with the body and with the
checkpoint's template. So they run in processes that can be killed (server/text/process.py).
"""

import random
from array import array
from dataclasses import replace
from typing import Any, TypeVar

from c2cserve.core.request import Sampling
from c2cserve.server.access.cache_salts import request_salt
from c2cserve.server.doors.readers import READERS
from c2cserve.server.doors.translation import Translated
from c2cserve.server.errors import ApiError
from c2cserve.server.fields import ChatBody, Common, CompletionBody
from c2cserve.server.settings import RequestLimits
from c2cserve.server.text.guiding import grammar_for
from c2cserve.server.text.limits import check_vocabulary, check_vocabulary_ids, within
from c2cserve.server.text.messages import Asked, Target, TextRequest, TextResult, TokenizedPrompt
from c2cserve.server.text.tokenizer import Tokenizer
from c2cserve.server.text.vocabulary import TokenizerError
from c2cserve.server.tools.reading import ReadingPlan

T = TypeVar("T", int, float)

_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""
_GREEDY_BELOW = 1e-5
"""Temperatures below this, by which single precision cannot divide, count as 0. The result is the
same: the likeliest token."""
_TOP_P_MIN = 1e-9
"""The smallest `top_p`: below the share of any likeliest token, and far from zero in single
precision."""


def do_work(work: TextRequest, tokenizer: Tokenizer | None) -> TextResult:
    """Prepare a request's text. Without a tokenizer, the body is only validated and the result has
    no prompts. Raises ApiError."""
    asked = READERS[work.api](work.body)
    try:
        return _prepared(asked, work, tokenizer)
    except ApiError as error:
        raise asked.names.of(error) from error


def _prepared(asked: Translated, work: TextRequest, tokenizer: Tokenizer | None) -> TextResult:
    body = asked.body
    texts = _texts(body)
    _check_counts(body, len(texts), work.limits)
    if body.max_tokens == 0 and not (isinstance(body, CompletionBody) and body.echo):
        raise ApiError(
            400, "max_tokens: 0 is for completions with echo; ask for at least 1",
            param="max_tokens",
        )  # fmt: skip
    if work.target is None or tokenizer is None:
        return TextResult(_asked(asked, Sampling(seed=0), None), [])
    sampling = _sampling(body, work.target)
    salt = request_salt(work.cache_salt, body.cache_salt)
    reader = _Reader(tokenizer, work.target, asked, work.limits, salt)
    try:
        prompts = [reader.read(text) for text in texts]
        grammar = grammar_for(
            body, tokenizer, work.target, reader.plan, work.limits.grammar_chars
        )  # fmt: skip
        if grammar is not None:
            # The end of a grammar is an end of the output, `ignore_eos` or not.
            ends = dict.fromkeys((*grammar.ends, *sampling.stop_token_ids))
            sampling = replace(sampling, grammar=grammar, stop_token_ids=tuple(ends))
        return TextResult(_asked(asked, sampling, reader.plan), prompts)
    except TokenizerError as error:
        raise ApiError(400, str(error), param=_prompt_field(body)) from error


def _prompt_field(body: Common) -> str:
    return "messages" if isinstance(body, ChatBody) else "prompt"


def _texts(body: CompletionBody | ChatBody) -> list[Any]:
    """Return the prompts, each a text or token ids. The messages of a chat are one prompt."""
    if isinstance(body, ChatBody):
        return [body.messages]
    given: Any = body.prompt
    several = isinstance(given, list) and not isinstance(given[0], int)
    return list(given) if several else [given]


# ---- limits -------------------------------------------------------------------------------------


def _check_counts(body: CompletionBody | ChatBody, prompts: int, limits: RequestLimits) -> None:
    """Check all limits that apply before tokenizing. Raises ApiError (400)."""
    choices = prompts * (body.n or 1)
    within("n", f"{prompts} prompts x n are {choices} choices", choices, limits.choices, "choices")
    stops = len(body.stops)
    within("stop", f"stop has {stops} strings", stops, limits.stops, "stops")
    for field in ("logit_bias", "stop_token_ids"):
        count = len(getattr(body, field) or ())
        within(field, f"{field} has {count} entries", count, limits.logit_bias, "logit-bias")
    if isinstance(body, ChatBody):
        count = len(body.messages)
        within("messages", f"there are {count} messages", count, limits.messages, "messages")
        chars = sum(message.chars for message in body.messages)
    else:
        chars = sum(len(one) for one in _texts(body) if isinstance(one, str))
    field = _prompt_field(body)
    within(
        field, f"{field} has {chars} characters", chars, limits.prompt_chars, "prompt-chars"
    )  # fmt: skip


# ---- prompts ------------------------------------------------------------------------------------


class _Reader:
    """Tokenizes the prompts of one request."""

    def __init__(
        self, tokenizer: Tokenizer, target: Target, asked: Translated, limits: RequestLimits,
        salt: bytes,
    ) -> None:  # fmt: skip
        """`salt` goes into the prefix hashes."""
        self._salt = salt
        self._tokenizer = tokenizer
        self._target = target
        self._body = asked.body
        self._unbounded = asked.unbounded or isinstance(asked.body, ChatBody)
        self._limits = limits
        self._field = _prompt_field(asked.body)
        self._tokens = 0
        """Prompt tokens of all choices so far."""
        self.plan: ReadingPlan | None = None
        """What to look for in outputs; known when a chat was read."""

    def read(self, given: Any) -> TokenizedPrompt:
        body, text = self._body, ""
        tokens: list[int]
        if isinstance(body, ChatBody):
            tokens = self._encode(self._render(body), special=False)
        elif isinstance(given, str):
            tokens, text = self._encode(given, special=True), given
        else:
            tokens = given
        max_new_tokens = self._max_new_tokens(len(tokens))
        self._count(len(tokens))
        if isinstance(given, list) and not isinstance(body, ChatBody):
            text = self._checked(tokens)
        echo = isinstance(body, CompletionBody) and bool(body.echo)
        scored = echo and body.logprobs is not None
        # The logits of every position are needed then, so no KV may come from the cache.
        hashes = () if scored else self._tokenizer.prefix_hashes(tokens, self._salt)
        return TokenizedPrompt(
            array("I", tokens).tobytes(), array("Q", hashes).tobytes(), text if echo else "",
            max_new_tokens,
        )  # fmt: skip

    def _checked(self, tokens: list[int]) -> str:
        """Return given token ids as text, for `echo`. Raises ApiError for ids outside the
        vocabulary."""
        check_vocabulary_ids(tokens, self._target, "prompt")
        return self._tokenizer.decode(tokens) if getattr(self._body, "echo", None) else ""

    def _render(self, body: ChatBody) -> str:
        messages = [message.plain() for message in body.messages]
        if body.offered and self._tokenizer.call_format is None:
            raise ApiError(
                400, "this model's chat template has no tools, or calls in a format that is not"
                " known here (known are those of Hermes and Qwen, Llama 3's JSON and Mistral's)",
                param="tools", code="unsupported_parameter",
            )  # fmt: skip
        text = self._tokenizer.render(messages, body.template_variables, self._limits.prompt_chars)
        reasoning = self._separates(body)
        if body.offered or reasoning:
            self.plan = ReadingPlan(
                self._tokenizer.call_format if body.offered else None,
                tuple(tool.function.name for tool in body.offered),
                body.parallel_tool_calls is False,
                reasoning, text.rstrip().endswith("<think>"),
                forced=bool(body.forced), named=body.names_tool,
            )  # fmt: skip
        return text

    def _separates(self, body: ChatBody) -> bool:
        """Return whether thoughts are split from the output. A request's own grammar holds all of
        the output."""
        if body.separate_reasoning is not None:
            return body.separate_reasoning
        held = body.structured_outputs
        return self._tokenizer.thinks and (held is None or held.grammar is None)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of a text. A text that is too long for any tokens is refused before it
        is tokenized. Raises ApiError."""
        longest, room = self._tokenizer.token_bytes_max, self._target.max_context
        size = len(text) if longest is None else len(text.encode())
        if longest is not None and size > longest * room:
            raise ApiError(
                400,
                f"This model's maximum context length is {room} tokens, and none of its tokens "
                f"stands for more than {longest} bytes. However, the text has {size} bytes. "
                "Please reduce the length of the prompt.",
                param=self._field, code="context_length_exceeded",
            )  # fmt: skip
        tokens = self._tokenizer.encode(text, special=special)
        check_vocabulary(tokens, self._target, self._field)
        return tokens

    def _count(self, tokens: int) -> None:
        """Count the tokens of a prompt for all its choices. Raises ApiError beyond the limit."""
        self._tokens += tokens * (self._body.n or 1)
        within(
            self._field, f"the prompts of all choices have {self._tokens} tokens", self._tokens,
            self._limits.prompt_tokens, "prompt-tokens",
        )  # fmt: skip

    def _max_new_tokens(self, count: int) -> int:
        """Return the tokens to sample after `count` of the prompt. Raises ApiError if they do not
        fit."""
        if count == 0:
            raise ApiError(400, "the prompt has no tokens", param=self._field)
        body, room = self._body, self._target.max_context - count
        usual = self._target.defaults.max_new_tokens
        wanted = body.max_tokens
        if isinstance(body, ChatBody):
            wanted = wanted or body.max_completion_tokens
        if self._unbounded:
            wanted = wanted or max(1, min(room, usual or room))
        if wanted is None:
            wanted = min(_COMPLETION_TOKENS, usual or _COMPLETION_TOKENS)
        if wanted > room:
            raise ApiError(
                400,
                f"This model's maximum context length is {self._target.max_context} tokens. "
                f"However, you requested {count + wanted} tokens ({count} in the prompt, {wanted} "
                "in the completion). Please reduce the length of the prompt or completion.",
                param=self._field, code="context_length_exceeded",
            )  # fmt: skip
        if (body.min_tokens or 0) > wanted:
            raise ApiError(400, "min_tokens is larger than max_tokens", param="min_tokens")
        return wanted or 1  # the token sampled for 0 is not fed back, and needs no room


# ---- everything else ----------------------------------------------------------------------------


def _asked(asked: Translated, sampling: Sampling, reading: ReadingPlan | None) -> Asked:
    body = asked.body
    options = body.stream_options
    return Asked(
        model=body.model,
        chat=isinstance(body, ChatBody),
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        service_tier=body.service_tier is not None,
        echo=isinstance(body, CompletionBody) and bool(body.echo),
        no_output=body.max_tokens == 0,
        stops=body.stops,
        priority=body.priority,
        sampling=sampling,
        reading=reading,
        repeated=asked.repeated,
    )


def _sampling(body: CompletionBody | ChatBody, target: Target) -> Sampling:
    """Return sampling parameters within single precision and 32-bit integers, so that an engine
    needs no checks. Raises ApiError."""
    bias = tuple((int(token), value) for token, value in (body.logit_bias or {}).items())
    for field, tokens in (
        ("logit_bias", [token for token, _ in bias]),
        ("stop_token_ids", body.stop_token_ids or []),
    ):
        for token in tokens:
            if not 0 <= token < target.vocab_size:
                raise ApiError(
                    400, f"token id {token} is not in the vocabulary of {target.vocab_size}",
                    param=field,
                )  # fmt: skip
    if isinstance(body, ChatBody):
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        prompt_logprobs = None
    else:
        logprobs = body.logprobs
        prompt_logprobs = logprobs if body.echo else None
    eos = () if body.ignore_eos else target.eos_token_ids
    usual = target.defaults
    temperature = _first(body.temperature, usual.temperature, 1.0)
    return Sampling(
        seed=random.getrandbits(63) if body.seed is None else body.seed % 2**64,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=max(_TOP_P_MIN, _first(body.top_p, usual.top_p, 1.0)),
        top_k=min(max(0, _first(body.top_k, usual.top_k, 0)), target.vocab_size),
        min_p=_first(body.min_p, usual.min_p, 0.0),
        repetition_penalty=_first(body.repetition_penalty, usual.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=bias,
        stop_token_ids=tuple(dict.fromkeys((*eos, *(body.stop_token_ids or ())))),
        min_tokens=body.min_tokens or 0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _first(asked: T | None, usual: T | None, otherwise: T) -> T:
    """Return what the request asks for, else the checkpoint's default, else `otherwise`."""
    if asked is not None:
        return asked
    return otherwise if usual is None else usual
