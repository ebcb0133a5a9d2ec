"""From a checked request body to jobs: models, templates, tokens, limits, seeds."""

import asyncio
import itertools
import random
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from c2cserve.core.request import Job, Request, Sampling, Slo
from c2cserve.runtime.gateway import Gateway, ModelFiles
from c2cserve.server.errors import ApiError
from c2cserve.server.fields import ChatBody, Common, CompletionBody
from c2cserve.server.tokenizer import Tokenizer, TokenizerError
from c2cserve.server.tokenizer_cache import TokenizerCache

_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""

# Handing a prompt to a thread and back costs about 0.1 ms. Up to so many characters, tokenizing
# takes less (benchmarks/server_overhead.py), and never more than 0.2 ms of the event loop.
_INLINE_CHARS = 128
_MESSAGE_CHARS = 32
_TOKENS_PER_CHAR = 8
"""Token ids that take as long as a character: they are only looked at and hashed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: list[int]
    text: str
    """For `echo`; empty for chats."""
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to run: `n` jobs per prompt, in the order of their choices."""

    files: ModelFiles
    tokenizer: Tokenizer
    prompts: list[Prompt]
    jobs: list[Job]
    """Choice i answers prompt i // n."""
    n: int
    stops: tuple[str, ...]
    arrival_s: float


class Preparer:
    """Tokenizing happens on threads of its own, except where it is cheaper than going there."""

    def __init__(self, gateway: Gateway, threads: int, tokenizers: int) -> None:
        self._gateway = gateway
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._tokenizers = TokenizerCache(tokenizers)
        self._ids = itertools.count(secrets.randbits(64))

    async def completion(self, body: CompletionBody, headers: Mapping[str, str]) -> Prepared:
        files = self._resolve(body.model)
        return await self._prepare(
            files, body, headers, _chars(body),
            lambda t: _completion_prompts(t, body, files.vocab_size),
        )  # fmt: skip

    async def chat(self, body: ChatBody, headers: Mapping[str, str]) -> Prepared:
        files = self._resolve(body.model)
        contents = [message.content for message in body.messages]
        size = sum(len(one) if isinstance(one, str) else _INLINE_CHARS for one in contents)
        # Rendering costs per message, and more than tokenizing a short one does.
        size += _MESSAGE_CHARS * len(contents)
        return await self._prepare(files, body, headers, size, lambda t: [_chat_prompt(t, body)])

    def _resolve(self, name: str) -> ModelFiles:
        files = self._gateway.resolve(name)
        if files is None:
            message = f"The model {name!r} does not exist"
            raise ApiError(404, message, param="model", code="model_not_found")
        return files

    async def _prepare(
        self,
        files: ModelFiles,
        body: Common,
        headers: Mapping[str, str],
        size: int,
        tokenize: Callable[[Tokenizer], list[Prompt]],
    ) -> Prepared:
        """`size`: about how many characters are to be tokenized."""
        arrival_s = time.monotonic()
        loop = asyncio.get_running_loop()
        tokenizer = self._tokenizers.get(files)
        try:
            if tokenizer is None:
                tokenizer = await loop.run_in_executor(self._threads, self._tokenizers.load, files)
        except TokenizerError as error:
            raise ApiError(503, f"the model {files.id!r} can not be served: {error}") from error
        try:
            if size <= _INLINE_CHARS:
                prompts = tokenize(tokenizer)
            else:
                prompts = await loop.run_in_executor(self._threads, tokenize, tokenizer)
        except TokenizerError as error:
            param = "messages" if isinstance(body, ChatBody) else "prompt"
            raise ApiError(400, str(error), param=param) from error
        for prompt in prompts:
            _check_vocabulary(prompt, files, "messages" if isinstance(body, ChatBody) else "prompt")
        n = body.n or 1
        sampling = _sampling(body, files)
        jobs: list[Job] = []
        for prompt in prompts:
            for i in range(n):
                one = sampling if i == 0 else replace(sampling, seed=(sampling.seed + i) % 2**64)
                name = f"{next(self._ids) % 2**64:016x}"
                jobs.append(_job(name, files, body, headers, prompt, one, arrival_s))
        return Prepared(files, tokenizer, prompts, jobs, n, body.stops, arrival_s)

    def forget(self, model: str) -> None:
        """Its files may have changed."""
        self._tokenizers.forget(model)


def _check_vocabulary(prompt: Prompt, files: ModelFiles, param: str) -> None:
    """A tokenizer may know tokens that the model has no embedding of."""
    if prompt.tokens and (largest := max(prompt.tokens)) >= files.vocab_size:
        raise ApiError(
            400,
            f"the tokenizer of {files.id!r} made token id {largest} of this text, and the model's "
            f"vocabulary is {files.vocab_size}",
            param=param,
        )


def _chars(body: CompletionBody) -> int:
    """About how many characters there are to tokenize, or more than can be done at once."""
    given: Any = body.prompt
    if isinstance(given, str):
        return len(given)
    if body.echo or not isinstance(given[0], int):
        return _INLINE_CHARS + 1
    return len(given) // _TOKENS_PER_CHAR


def _completion_prompts(
    tokenizer: Tokenizer, body: CompletionBody, vocab_size: int
) -> list[Prompt]:
    given: Any = body.prompt
    several = isinstance(given, list) and not isinstance(given[0], int)
    prompts: list[Prompt] = []
    for one in given if several else [given]:
        if isinstance(one, str):
            tokens, text = tokenizer.encode(one), one
        else:
            tokens = list(one)
            if max(tokens) >= vocab_size:
                raise ApiError(
                    400, f"token id {max(tokens)} is not in the vocabulary of {vocab_size}",
                    param="prompt",
                )  # fmt: skip
            text = tokenizer.decode(tokens) if body.echo else ""
        scored = bool(body.echo) and body.logprobs is not None
        # Every position's logits are wanted then: nothing may come from the cache.
        prompts.append(Prompt(tokens, text, () if scored else tokenizer.prefix_hashes(tokens)))
    return prompts


def _chat_prompt(tokenizer: Tokenizer, body: ChatBody) -> Prompt:
    messages = [message.plain() for message in body.messages]
    rendered = tokenizer.render(messages, body.chat_template_kwargs or {})
    tokens = tokenizer.encode(rendered, special=False)
    return Prompt(tokens, "", tokenizer.prefix_hashes(tokens))


def _sampling(body: Common, files: ModelFiles) -> Sampling:
    top_k = body.top_k or 0
    bias = tuple((int(token), value) for token, value in (body.logit_bias or {}).items())
    for token in (*(token for token, _ in bias), *(body.stop_token_ids or ())):
        if not 0 <= token < files.vocab_size:
            raise ApiError(
                400, f"token id {token} is not in the vocabulary of {files.vocab_size}",
                param="logit_bias" if bias else "stop_token_ids",
            )  # fmt: skip
    if isinstance(body, ChatBody):
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        prompt_logprobs = None
    else:
        logprobs = body.logprobs if isinstance(body, CompletionBody) else None
        echoed = isinstance(body, CompletionBody) and body.echo
        prompt_logprobs = logprobs if echoed else None
    eos = () if body.ignore_eos else files.eos_token_ids
    return Sampling(
        seed=random.getrandbits(63) if body.seed is None else body.seed % 2**64,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, top_k),
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=bias,
        stop_token_ids=tuple(dict.fromkeys((*eos, *(body.stop_token_ids or ())))),
        min_tokens=body.min_tokens or 0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _job(
    name: str,
    files: ModelFiles,
    body: Common,
    headers: Mapping[str, str],
    prompt: Prompt,
    sampling: Sampling,
    arrival_s: float,
) -> Job:
    count = len(prompt.tokens)
    if count == 0:
        raise ApiError(400, "the prompt has no tokens", param="prompt")
    room = files.max_context - count
    wanted = body.max_tokens
    if isinstance(body, ChatBody):
        wanted = wanted or body.max_completion_tokens or max(1, room)
    wanted = wanted or _COMPLETION_TOKENS
    if wanted > room:
        raise ApiError(
            400,
            f"This model's maximum context length is {files.max_context} tokens. However, you "
            f"requested {count + wanted} tokens ({count} in the prompt, {wanted} in the "
            "completion). Please reduce the length of the prompt or completion.",
            param="messages" if isinstance(body, ChatBody) else "prompt",
            code="context_length_exceeded",
        )
    if (body.min_tokens or 0) > wanted:
        raise ApiError(400, "min_tokens is larger than max_tokens", param="min_tokens")
    request = Request(
        id=name,
        model=files.key,
        prompt_len=count,
        max_new_tokens=wanted,
        arrival_s=arrival_s,
        slo=Slo(
            _header_ms(headers, "x-slo-ttft-ms", files.ttft_s),
            _header_ms(headers, "x-slo-tpot-ms", files.tpot_s),
        ),
        prefix_hashes=prompt.hashes,
        priority=files.priority if body.priority is None else body.priority,
    )
    return Job(request, tuple(prompt.tokens), sampling)


def _header_ms(headers: Mapping[str, str], name: str, default_s: float) -> float:
    value = headers.get(name)
    if value is None:
        return default_s
    try:
        seconds = float(value) / 1e3
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ApiError(400, f"{name}: {value!r} is not a positive number of milliseconds")
    return seconds
