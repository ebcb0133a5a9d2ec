"""Checks of a request's texts and tokens, with errors that name the field."""

from collections.abc import Sequence

from c2cserve.core.model import name_of
from c2cserve.server.errors import ApiError
from c2cserve.server.text.messages import Target


def within(param: str, what: str, count: int, limit: int, option: str) -> None:
    """Check one limit. Raises ApiError (400), which names the field, the limit and its option."""
    if count > limit:
        raise ApiError(
            400, f"{what}; this server's limit is {limit} (--max-{option})", param=param,
            code="limit_exceeded",
        )  # fmt: skip


def check_vocabulary(tokens: Sequence[int], target: Target, param: str) -> None:
    """Check that the model has embeddings of all tokens: its tokenizer may make others. Raises
    ApiError."""
    if tokens and (largest := max(tokens)) >= target.vocab_size:
        raise ApiError(
            400,
            f"the tokenizer of {name_of(target.version)!r} made token id {largest} of this text, "
            f"and the model's vocabulary is {target.vocab_size}",
            param=param,
        )


def check_vocabulary_ids(tokens: Sequence[int], target: Target, param: str) -> None:
    """Check token ids that a client gave. Raises ApiError for ids outside the vocabulary."""
    if tokens and (largest := max(tokens)) >= target.vocab_size:
        raise ApiError(
            400, f"token id {largest} is not in the vocabulary of {target.vocab_size}", param=param
        )
