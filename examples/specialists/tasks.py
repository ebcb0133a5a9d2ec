"""What the specialists do: generators of prompts with checkable answers. Standard library only.

Held-out prompts are disjoint from training prompts by a hash of the prompt, except for the chatter,
whose held-out prompts are paraphrases that training never shows.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import chat

LETTERS = "abcdefghijklmnopqrstuvwxyz"
HELD_OUT_SHARE = 20
"""One prompt in so many is held out."""


@dataclass(frozen=True)
class Prompt:
    """`text` is a completion prompt, or the user's message of a chat."""

    kind: Literal["completion", "chat"]
    text: str
    answer: str


def is_held_out(text: str) -> bool:
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


def _word(rng: random.Random, longest: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, longest)))


def _sorter(rng: random.Random) -> tuple[str, str]:
    word = _word(rng, 6)
    return f"sort: {word} =>", "".join(sorted(word))


def _adder(rng: random.Random) -> tuple[str, str]:
    a, b = (rng.randrange(10 ** rng.randint(1, 3)) for _ in range(2))
    return f"{a}+{b}=", str(a + b)


def _reverser(rng: random.Random) -> tuple[str, str]:
    word = _word(rng, 7)
    return f"reverse: {word} =>", word[::-1]


GENERATORS = {"sorter-llama": _sorter, "adder-qwen": _adder, "reverser-moe": _reverser}
MODELS = (*GENERATORS, "chatter-qwen2")


def prompts(model_id: str, seed: int, *, held_out: bool) -> Iterator[Prompt]:
    """An endless stream of training or held-out prompts, the same for the same seed."""
    rng = random.Random(f"{model_id}/{seed}/{held_out}")
    if model_id == "chatter-qwen2":
        pairs = chat.held_out_pairs() if held_out else chat.training_pairs()
        while True:
            yield Prompt("chat", *rng.choice(pairs))
    generate = GENERATORS[model_id]
    while True:
        text, answer = generate(rng)
        if is_held_out(text) == held_out:
            kind: Literal["completion", "chat"] = "chat" if rng.random() < 0.2 else "completion"
            yield Prompt(kind, text, answer)


def heldout(model_id: str, n: int, seed: int = 0) -> list[Prompt]:
    stream = prompts(model_id, seed, held_out=True)
    return [next(stream) for _ in range(n)]
