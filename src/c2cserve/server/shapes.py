"""OpenAI's response shapes, as plain dicts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from c2cserve.core.model import ModelStatus
from c2cserve.core.request import TokenLogprob
from c2cserve.server.choices import ChoicePiece, ChoiceStream
from c2cserve.server.text.detokenize import Detokenizer
from c2cserve.server.text.messages import Asked
from c2cserve.server.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that all chunks of a response share."""

    chat: bool
    fields: dict[str, Any]

    @classmethod
    def new(cls, request_id: str, asked: Asked, fingerprint: str) -> "Envelope":
        prefix, kind = "cmpl", "text_completion"
        if asked.chat:
            prefix = "chatcmpl"
            kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        fields = {
            "id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time()),
            "model": asked.model, "system_fingerprint": fingerprint,
        }  # fmt: skip
        if asked.service_tier:
            fields["service_tier"] = "default"  # there is no other one
        return cls(asked.chat, fields)

    def wrap(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.fields, "choices": choices}


def usage(choices: Sequence[ChoiceStream], prompts: int) -> dict[str, Any]:
    """Return the usage of a response. A prompt counts once, however many choices answer it."""
    per_prompt = choices[:: max(1, len(choices) // prompts)]
    prompt = sum(len(choice.prompt.tokens) for choice in per_prompt)
    output = sum(choice.output_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in per_prompt)},
    }


def choice_usage(choice: ChoiceStream, output: int) -> dict[str, Any]:
    """Return the usage of one choice so far, with `output` tokens: in its chunks, as in vLLM's."""
    prompt = len(choice.prompt.tokens)
    return {
        "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
    }  # fmt: skip


def chat_logprobs(vocabulary: Vocabulary, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        text, raw = vocabulary.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": raw}

    content = [
        {**one(entry.token, entry.logprob), "top_logprobs": [one(*top) for top in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    vocabulary: Vocabulary,
    entries: Sequence[TokenLogprob],
    offsets: Sequence[int],
    unscored: int | None = None,
) -> dict[str, Any]:
    """Return log-probabilities in the shape of /v1/completions. `offsets`: where each token's text
    begins. `unscored`: a token before the entries that has no log-probability (the prompt's first);
    its offset is 0."""
    tokens = [vocabulary.token_text(entry.token)[0] for entry in entries]
    values: list[float | None] = [entry.logprob for entry in entries]
    tops: list[dict[str, float] | None] = [_top(vocabulary, entry) for entry in entries]
    places = list(offsets)
    if unscored is not None:
        tokens.insert(0, vocabulary.token_text(unscored)[0])
        values.insert(0, None)
        tops.insert(0, None)
        places.insert(0, 0)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": places}


def _top(vocabulary: Vocabulary, entry: TokenLogprob) -> dict[str, float]:
    """Return text -> log-probability. Several tokens may show the same text, such as parts of
    characters; the likeliest one counts."""
    top: dict[str, float] = {}
    for token, logprob in (*entry.top, *([(entry.token, entry.logprob)] if entry.top else [])):
        text = vocabulary.token_text(token)[0]
        top[text] = max(logprob, top.get(text, logprob))
    return top


def token_offsets(vocabulary: Vocabulary, tokens: Sequence[int]) -> list[int]:
    """Return where the text of each token of a prompt begins, in characters."""
    detokenizer = Detokenizer(vocabulary, [])
    offset, offsets = 0, list[int]()
    for token in tokens:
        offsets.append(offset)
        offset += len(detokenizer.add((token,)))
    return offsets


def chat_chunk(
    piece: ChoicePiece, logprobs: dict[str, Any] | None, *, first: bool
) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": piece.text} if piece.text or first else {}
    if first:
        delta["role"] = "assistant"
    return {
        "index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish,
    }  # fmt: skip


def text_chunk(piece: ChoicePiece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "index": piece.index, "text": piece.text, "logprobs": logprobs,
        "finish_reason": piece.finish,
    }  # fmt: skip


def model_card(status: ModelStatus) -> dict[str, Any]:
    """Return a model as /v1/models lists it, in any state."""
    return {
        "id": status.id, "object": "model", "created": status.created_s, "owned_by": "c2cserve",
        "max_model_len": status.max_context, "state": status.state.value,
        "aliases": status.aliases,
    }  # fmt: skip
