"""Streams of tokens for tests of detokenizing."""

import itertools
from collections.abc import Sequence

from c2cserve.server.text.detokenize import Detokenizer
from c2cserve.server.text.tokenizer import Tokenizer


def stream(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], group: int = 1
) -> tuple[str, list[str]]:
    """The whole text and what each group of tokens brought."""
    detokenizer = Detokenizer(tokenizer, list(prompt))
    parts = [detokenizer.add(tuple(output[i : i + group])) for i in range(0, len(output), group)]
    parts.append(detokenizer.finish())
    return "".join(parts), parts


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int]) -> str:
    before = tokenizer.decode(list(prompt))
    return tokenizer.decode([*prompt, *output])[len(before) :]


def pieces(text: str, borders: Sequence[int]) -> list[str]:
    at = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(at)]
