"""OpenAI's response shapes, as plain dicts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from c2cserve.core.request import TokenLogprob
from c2cserve.server.choices import Choice, Piece
from c2cserve.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of a response share."""

    id: str
    model: str
    created: int
    chat: bool
    fingerprint: str

    @classmethod
    def new(cls, request_id: str, model: str, chat: bool, fingerprint: str) -> "Envelope":
        prefix = "chatcmpl" if chat else "cmpl"
        return cls(f"{prefix}-{request_id}", model, int(time.time()), chat, fingerprint)

    def wrap(self, choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": choices,
        }  # fmt: skip


def usage(choices: Sequence[Choice], prompts: int) -> dict[str, Any]:
    """Prompt tokens count once per prompt, however many choices answer it."""
    per_prompt = choices[:: max(1, len(choices) // prompts)]
    prompt = sum(len(choice.prompt.tokens) for choice in per_prompt)
    output = sum(choice.output_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in per_prompt)},
    }


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        text, raw = tokenizer.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": raw}

    content = [
        {**one(entry.token, entry.logprob), "top_logprobs": [one(*top) for top in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Keeps the running `text_offset` of a choice."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def of(
        self, entries: Sequence[TokenLogprob | None], first: int | None = None
    ) -> dict[str, Any]:
        """`first`: a token without a log-probability (the prompt's first) before them."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        if first is not None:
            self._append(first, None, None, (tokens, values, tops, offsets))
        for entry in entries:
            assert entry is not None
            top = {self._tokenizer.token_text(t)[0]: v for t, v in entry.top}
            if entry.top:
                top.setdefault(self._tokenizer.token_text(entry.token)[0], entry.logprob)
            self._append(entry.token, entry.logprob, top, (tokens, values, tops, offsets))
        return {
            "tokens": tokens, "token_logprobs": values, "top_logprobs": tops,
            "text_offset": offsets,
        }  # fmt: skip

    def _append(
        self, token: int, value: float | None, top: dict[str, float] | None,
        into: tuple[list[str], list[float | None], list[dict[str, float] | None], list[int]],
    ) -> None:  # fmt: skip
        text, _ = self._tokenizer.token_text(token)
        for column, item in zip(into, (text, value, top, self._offset), strict=True):
            column.append(item)  # pyright: ignore[reportArgumentType]
        self._offset += len(text)


def chat_chunk(piece: Piece, logprobs: dict[str, Any] | None, *, first: bool) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": piece.text} if piece.text or first else {}
    if first:
        delta["role"] = "assistant"
    return {
        "index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish,
    }  # fmt: skip


def text_chunk(piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "index": piece.index, "text": piece.text, "logprobs": logprobs,
        "finish_reason": piece.finish,
    }  # fmt: skip
