"""Preparing a request: ask a text process, make a job per choice."""

import asyncio
import itertools
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from c2cserve.core.request import Job, Request, Slo
from c2cserve.runtime.gateway import Gateway, ModelFiles
from c2cserve.server.access.cache_salts import CacheSalts
from c2cserve.server.errors import ApiError
from c2cserve.server.model_names import unknown_model
from c2cserve.server.settings import RequestLimits
from c2cserve.server.text.messages import (
    Api,
    Asked,
    Target,
    TextAnswer,
    TextRequest,
    TextResult,
    TokenizedPrompt,
)
from c2cserve.server.text.pool import TextPool
from c2cserve.server.text.vocabulary import Vocabulary

PROMPT_FIELDS: dict[Api, str] = {
    "completions": "prompt", "chat": "messages", "tokenize": "prompt", "detokenize": "tokens",
    "messages": "messages", "count_tokens": "messages", "ollama_chat": "messages",
    "ollama_generate": "prompt", "ollama_show": "model", "responses": "input",
}  # fmt: skip
"""The field to blame for a text that is too long, or takes too long."""
_JOBS_AT_ONCE = 32
"""Jobs that are made before other tasks get a turn on the event loop."""


class _Named(msgspec.Struct):
    """The only part of a body that the server itself reads."""

    model: str = ""


_read_name = msgspec.json.Decoder(_Named).decode


def model_of(body: bytes) -> str:
    """Return the model that a body names; empty if it names none, which its validation reports
    later. Skipping the rest takes 2 ms per MB."""
    try:
        return _read_name(body).model
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return ""


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    api: Api
    body: bytes
    model: str
    """The model's name in the body, as `model_of` reads it."""
    headers: Mapping[str, str]
    tenant: str
    cache_group: str
    """Requests of one group reuse each other's KV."""
    allows: Callable[[str], bool]
    """Whether its key may use the model of an id."""
    arrived_s: float
    """When the kernel had all of it (`shedding.arrival`)."""
    read_s: float
    """When the event loop had."""
    let_in: bool = False
    """The load shedder has let it in."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    tokens: tuple[int, ...]
    text: str
    """The prompt's text for `echo`; empty for chats."""
    hashes: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to run: `n` jobs per prompt, in the order of their choices."""

    asked: Asked
    vocabulary: Vocabulary
    prompts: list[PreparedPrompt]
    jobs: list[Job]
    """Choice i answers prompt i // n."""
    read_s: float
    """When the event loop had read the request."""


class Preparer:
    """Prepares requests. The event loop only makes jobs; all work that grows with a body is done in
    text processes."""

    def __init__(self, gateway: Gateway, texts: TextPool, limits: RequestLimits) -> None:
        self._gateway = gateway
        self._texts = texts
        self._limits = limits
        self._salts = CacheSalts()
        self._ids = itertools.count(secrets.randbits(64))
        self._preparing = Counter[str]()
        """Tenant -> its requests that are being prepared."""

    async def answer(self, incoming: IncomingRequest, files: ModelFiles | None) -> bytes:
        """Return the answer to /tokenize or /detokenize, as JSON. Raises ApiError, and `Refused`
        when the tokenizer cannot be used."""
        target = None if files is None else Target.of(files)
        work = TextRequest(incoming.api, incoming.body, target, self._limits)
        done, _ = await self._texts.work(work, files, PROMPT_FIELDS[incoming.api])
        assert isinstance(done, TextAnswer)
        self._check_model(incoming, files, done.model)
        return done.content

    def _check_model(self, incoming: IncomingRequest, files: ModelFiles | None, name: str) -> None:
        """Check that a model was found by the name in the body. Raises ApiError."""
        if files is None:
            known = [one for one in self._gateway.models() if incoming.allows(one.id)]
            raise unknown_model(name, known)
        # The name may lead to another version by now, or to none: the gateway refuses the job then.
        if name != incoming.model:
            raise ApiError(400, "the body names several models", param="model")

    def check_overload(
        self, files: ModelFiles, tenant: str, headers: Mapping[str, str], arrived_s: float
    ) -> None:
        """Check that a request of which nothing was done yet can be in time. Raises ApiError, and
        `Refused` (429) in an overload."""
        ttft_s = _header_ms(headers, "x-slo-ttft-ms", files.ttft_s)
        refused = self._gateway.overload(files.key, tenant, ttft_s, arrived_s, self._preparing)
        if refused is not None:
            raise refused

    def let_in(self, tenant: str) -> None:
        """Count a request as being prepared until its own turn on the event loop, where `prepare`
        counts it. Those that are read before that turn see it."""
        self._preparing[tenant] += 1
        asyncio.get_running_loop().call_soon(self._leave, tenant)

    def _leave(self, tenant: str) -> None:
        self._preparing[tenant] -= 1
        if not self._preparing[tenant]:
            del self._preparing[tenant]

    async def prepare(self, incoming: IncomingRequest, files: ModelFiles | None) -> Prepared:
        """Prepare a request for the model that its name leads to, None if to no model. Raises
        ApiError, and `Refused` in an overload."""
        tenant = incoming.tenant
        if files is not None and not incoming.let_in:
            self.check_overload(files, tenant, incoming.headers, incoming.arrived_s)
        self._preparing[tenant] += 1
        try:
            return await self._prepare(incoming, files)
        finally:
            self._leave(tenant)

    async def _prepare(self, incoming: IncomingRequest, files: ModelFiles | None) -> Prepared:
        api, headers = incoming.api, incoming.headers
        target = None if files is None else Target.of(files)
        salt = self._salts.of_group(incoming.cache_group)
        work = TextRequest(api, incoming.body, target, self._limits, salt)
        done, vocabulary = await self._texts.work(work, files, PROMPT_FIELDS[api])
        assert isinstance(done, TextResult)
        asked = done.asked
        self._check_model(incoming, files, asked.model)
        assert files is not None
        assert vocabulary is not None
        prompts = [_prompt(one) for one in done.prompts]
        slo = Slo(
            _header_ms(headers, "x-slo-ttft-ms", files.ttft_s),
            _header_ms(headers, "x-slo-tpot-ms", files.tpot_s),
        )
        jobs: list[Job] = []
        several = len(prompts) * asked.n > 1
        group = self._id() if several else ""
        for number in range(len(prompts) * asked.n):
            if number and number % _JOBS_AT_ONCE == 0:
                await asyncio.sleep(0)
            prompt = prompts[number // asked.n]
            choice = number % asked.n
            jobs.append(self._job(files, asked, prompt, choice, slo, incoming, group))
        return Prepared(asked, vocabulary, prompts, jobs, incoming.read_s)

    def _id(self) -> str:
        return f"{next(self._ids) % 2**64:016x}"

    def _job(
        self, files: ModelFiles, asked: Asked, prompt: PreparedPrompt, choice: int, slo: Slo,
        incoming: IncomingRequest, group: str,
    ) -> Job:  # fmt: skip
        sampling = asked.sampling
        if choice:
            sampling = replace(sampling, seed=(sampling.seed + choice) % 2**64)
        request = Request(
            id=self._id(),
            model=files.key,
            prompt_len=len(prompt.tokens),
            max_new_tokens=prompt.max_new_tokens,
            arrival_s=incoming.arrived_s,
            slo=slo,
            prefix_hashes=prompt.hashes,
            priority=files.priority if asked.priority is None else asked.priority,
            tenant=incoming.tenant,
            group=group,
        )
        return Job(request, prompt.tokens, sampling)


def _prompt(one: TokenizedPrompt) -> PreparedPrompt:
    tokens, hashes = array("I", one.tokens), array("Q", one.hashes)
    return PreparedPrompt(tuple(tokens), one.text, tuple(hashes), one.max_new_tokens)


def _header_ms(headers: Mapping[str, str], name: str, default_s: float) -> float:
    value = headers.get(name)
    if value is None:
        return default_s
    try:
        seconds = float(value) / 1e3
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        shown = value[:100]
        raise ApiError(
            400, f"{name}: {shown!r} is not a positive number of milliseconds", param=name
        )
    return seconds
