"""A request as policies see it, and the payload that travels beside it."""

from enum import StrEnum

from c2cserve.core.value import value

BLOCK_TOKENS = 16
"""Tokens per KV block, on every slice kind: prefix hashes and block tables count in it."""


@value
class Slo:
    """Targets a request is held to: time to first token and time per output token, seconds."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1
    excuses_loads: bool = False
    """The time to the first token does not count while a slice loads the model for the request."""


def blocks_of(tokens: int) -> int:
    """Return the number of KV blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


@value
class Request:
    """What policies know of a request: lengths and hashes, never token ids.

    `prefix_hashes` holds one chained 64-bit hash per *full* block of `BLOCK_TOKENS` prompt tokens.
    A request may be resumed after its slice was lost. Then the tokens already sent count into
    `prompt_len` and `sent`, and reduce `max_new_tokens`; `arrival_s` stays the first."""

    id: str
    model: str
    prompt_len: int
    max_new_tokens: int
    arrival_s: float
    slo: Slo = Slo()
    prefix_hashes: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""
    sent: int = 0
    group: str = ""
    """Choices of one request have the same: they are let in or refused together. Empty: it has only
    this one."""

    def __post_init__(self) -> None:
        if self.prompt_len < 1 or self.max_new_tokens < 1:
            raise ValueError(f"request {self.id}: prompt_len and max_new_tokens must be at least 1")

    @property
    def max_len(self) -> int:
        """Tokens the KV cache holds at most for this request (the last token is never stored)."""
        return self.prompt_len + self.max_new_tokens - 1

    @property
    def first_token_due_s(self) -> float:
        return self.arrival_s + self.slo.ttft_s

    @property
    def excuses_loads(self) -> bool:
        """Whether its first token is still to come, and may wait for a load."""
        return self.slo.excuses_loads and not self.sent


@value
class Grammar:
    """What an output is held to."""

    text: str
    """The grammar, in the dialect of Lark that `grammars.write` writes."""
    tokens: str
    """The path of the file with the bytes of the vocabulary (`grammars.table`)."""
    ends: tuple[int, ...]
    """The model's end tokens: they may come where the grammar may end, and nowhere else."""


@value
class Sampling:
    """How tokens are drawn. `seed` is always set (the server draws one), so a resumed request
    continues exactly: the random stream is keyed by (seed, output position)."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output; the model's own EOS ids are among them unless ignored."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Alternatives reported per output token; None reports nothing, 0 only the chosen token."""
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


@value
class SamplingDefaults:
    """The sampling that a checkpoint recommends. It applies where a request says nothing; None:
    the checkpoint says nothing either."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def __str__(self) -> str:
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
        given = ((name, getattr(self, name)) for name in names)
        return ", ".join(f"{name} {one:g}" for name, one in given if one is not None)


@value
class Job:
    """A request with its payload. `tokens` = prompt, then output tokens already sent (resume);
    `len(tokens) == request.prompt_len`, the last `request.sent` of them being output."""

    request: Request
    tokens: tuple[int, ...]
    sampling: Sampling


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token was drawn (it is not part of the output's text)."""
    LENGTH = "length"
    ERROR = "error"


@value
class TokenLogprob:
    """One position's log-probabilities (natural log, of the raw logits): chosen, then the top."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@value
class Delta:
    """New output of one request. The last delta of a request, and only it, has `finish` set.

    `tokens` includes a stop token that ended the output (the server does not show it).
    `prompt_logprobs` comes with the first delta when asked for: one entry per prompt token but
    the first. `timing` comes with the first delta.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV was reused, reported in the first delta."""
    timing: "Timing | None" = None
    error: str = ""

    def renamed(self, request_id: str) -> "Delta":
        """Return the same output under another id. It is done for every token, and
        `dataclasses.replace` takes several times as long."""
        return Delta(
            request_id, self.tokens, self.logprobs, self.prompt_logprobs, self.finish,
            self.cached_tokens, self.timing, self.error,
        )  # fmt: skip


@value
class Timing:
    """Where the time to the first token went, seconds; `switched`: the slice's step before this
    request's first one ran another model."""

    slice: str
    switched: bool
    queue_s: float
    """The time from arrival at the worker to the start of the first step."""
    switch_s: float
    """The time from picking the request's model to the start of its first kernel."""
    wait_weights_s: float
    """Spent parked until weights were in host memory (cold models)."""
    prefill_s: float
    wait_s: float = 0.0
    """The time from its arrival at the server until the controller sent it to its slice."""
    report_s: float = 0.0
    """The time from its arrival until its first token was back at the controller."""
