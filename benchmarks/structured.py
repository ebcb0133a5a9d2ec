"""What a grammar costs: time per token of streams with and without one, side by side in turns.

    python benchmarks/structured.py http://127.0.0.1:8000 MODEL --users 32 --tokens 256

All streams of a round have as many tokens: the free ones ignore the end token, and those with a
grammar are held to a JSON list that is longer than they are. A round with a mix shows what streams
without a grammar pay beside others that have one.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

SCHEMA: dict[str, Any] = {
    "type": "array", "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        },
        "required": ["name", "age", "tags"], "additionalProperties": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Stream:
    held: bool
    tpot_s: float
    """Mean time between its tokens."""


async def stream(
    session: aiohttp.ClientSession, url: str, model: str, tokens: int, seed: int, *, held: bool
) -> Stream:
    body: dict[str, Any] = {
        "model": model, "prompt": f"Write down {seed} persons as JSON:", "max_tokens": tokens,
        "stream": True, "seed": seed, "temperature": 0.8, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    if held:
        body["structured_outputs"] = {"json": SCHEMA}
    first_s = last_s = 0.0
    made = 0
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                made = event["usage"]["completion_tokens"]
                continue
            last_s = time.perf_counter()
            first_s = first_s or last_s
    assert made > 1, "an answer of one token has no time between tokens"
    return Stream(held, (last_s - first_s) / (made - 1))


async def measure(url: str, model: str, users: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the median time per token of streams, by their round: none held, all, or each other
    one."""
    found: dict[str, list[Stream]] = {"free": [], "held": [], "mixed": []}
    whose = {"free": lambda _: False, "held": lambda _: True, "mixed": lambda i: i % 2 == 0}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        for number in range(rounds + 1):
            for kind, held in whose.items():
                streams = await asyncio.gather(*(
                    stream(session, url, model, tokens, number * users + i, held=held(i))
                    for i in range(users)
                ))  # fmt: skip
                if number:  # the first round builds the vocabulary's tree and the graphs
                    found[kind] += streams
    plain_s = _median(found["free"])
    return {
        "users": users, "tokens": tokens, "rounds": rounds,
        "free_ms": plain_s * 1e3,
        "held_ms": _median(found["held"]) * 1e3,
        "held_over_free": _median(found["held"]) / plain_s,
        "free_beside_held_over_free": _median([s for s in found["mixed"] if not s.held]) / plain_s,
        "held_beside_free_over_free": _median([s for s in found["mixed"] if s.held]) / plain_s,
    }  # fmt: skip


def _median(streams: Sequence[Stream]) -> float:
    return statistics.median(one.tpot_s for one in streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found = asyncio.run(measure(args.url, args.model, args.users, args.tokens, args.rounds))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
