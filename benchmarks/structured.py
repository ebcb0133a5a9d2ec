"""What a grammar costs: time per token of streams with and without one, side by side in turns.

    python benchmarks/structured.py [--shape llama-8b] [--users 32 ...] [--tokens 256] [--out FILE]
        [--cpu-threads N] [--serve ARGUMENTS] [--work DIR]
    python benchmarks/structured.py --url http://127.0.0.1:8000 --model MODEL

A random model of the shape is served, whose tokens are texts of one to seven letters, or --url's.
All streams of a round have as many tokens: the free ones ignore the end token, and those with a
grammar are held to a JSON list that is longer than they are. A mix shows what streams without a
grammar pay beside others that have one. Ratios are of streams of one round, whose kinds take turns
in being first, and the median of all rounds: other work on the machine changes meanwhile.
With --cpu-threads 1 the processor time of the worker is compared too. Where other work takes the
cores, it says more than the time that passed; it lacks what a step waits for late masks.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from catalogue_files import pick, write_catalogue
from catalogue_server import Server
from gpu_models import SHAPES, config_of
from report import report
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

_READY_S = 180.0
_END = "<end>"
_LETTERS = "\u0120" + "eeeetttaaaoooiiinnnsssrrhhlldducmfpgwybvkxjqz" + '"{}[],:0123456789'
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
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {await answer.text()}")
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


class Processors:
    """The processor time of a slice's worker, and of the process that makes its masks."""

    def __init__(self, url: str) -> None:
        with urllib.request.urlopen(f"{url}/admin/state") as answer:
            [slice_] = json.load(answer)["slices"]
        self._worker = int(slice_["pid"])

    def now_s(self) -> tuple[float, float]:
        children = Path(f"/proc/{self._worker}/task").glob("*/children")
        pids = [int(pid) for one in children for pid in one.read_text().split()]
        return _processor_s(self._worker), sum(map(_processor_s, pids))


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(
    url: str, model: str, users: int, tokens: int, rounds: int, processors: Processors | None
) -> dict[str, Any]:
    """Return median times per token of streams: with none of them held, all, or every other
    one."""
    found: dict[str, list[list[Stream]]] = {"free": [], "held": [], "mixed": []}
    used: dict[str, list[tuple[float, float]]] = {"free": [], "held": [], "mixed": []}
    whose = {"free": lambda _: False, "held": lambda _: True, "mixed": lambda i: i % 2 == 0}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        for number in range(rounds + 1):
            kinds = list(whose.items())
            for kind, held in kinds[number % 3 :] + kinds[: number % 3]:
                before = processors.now_s() if processors is not None else (0.0, 0.0)
                streams = await asyncio.gather(*(
                    stream(session, url, model, tokens, number * users + i, held=held(i))
                    for i in range(users)
                ))  # fmt: skip
                if number:  # the first round builds the vocabulary's tree and the graphs
                    found[kind].append(streams)
                    after = processors.now_s() if processors is not None else (0.0, 0.0)
                    used[kind].append((after[0] - before[0], after[1] - before[1]))
    free, held = found["free"], found["held"]
    beside = [[one for one in streams if not one.held] for streams in found["mixed"]]
    among = [[one for one in streams if one.held] for streams in found["mixed"]]
    by_round = [_median_s(one) / _median_s(plain) for one, plain in zip(held, free, strict=True)]
    return {
        "users": users, "tokens": tokens, "rounds": rounds,
        "free_ms": statistics.median(map(_median_s, free)) * 1e3,
        "held_ms": statistics.median(map(_median_s, held)) * 1e3,
        "held_over_free": statistics.median(by_round),
        "held_over_free_by_round": by_round,
        "free_beside_held_over_free": _ratio(beside, free),
        "held_beside_free_over_free": _ratio(among, free),
        **({} if processors is None else _processor_figures(used, tokens)),
    }  # fmt: skip


def _processor_figures(
    used: dict[str, list[tuple[float, float]]], tokens: int
) -> dict[str, float | list[float]]:
    """Return processor times: of the worker as ratios of rounds, of masks beside the worker's."""
    ratios = {
        kind: [one[0] / plain[0] for one, plain in zip(used[kind], used["free"], strict=True)]
        for kind in ("held", "mixed")
    }
    return {
        "worker_free_ms_per_step": statistics.median(one for one, _ in used["free"]) / tokens * 1e3,
        "worker_held_over_free": statistics.median(ratios["held"]),
        "worker_held_over_free_by_round": ratios["held"],
        "worker_mixed_over_free": statistics.median(ratios["mixed"]),
        "masks_over_worker": statistics.median(masks / all_ for all_, masks in used["held"]),
    }


def _median_s(streams: Sequence[Stream]) -> float:
    return statistics.median(one.tpot_s for one in streams)


def _ratio(ones: Sequence[Sequence[Stream]], free: Sequence[Sequence[Stream]]) -> float | None:
    """Return the median over rounds; None where a round has no such stream."""
    if not all(ones):
        return None
    return statistics.median(
        _median_s(one) / _median_s(plain) for one, plain in zip(ones, free, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="measure this server instead")
    parser.add_argument("--model", default="m", help="its name there")
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--serve", default="", help="arguments of `c2cserve serve`, one string")
    parser.add_argument("--work", type=Path, help="for the checkpoint and the pool; /dev/shm")
    parser.add_argument("--cpu-threads", type=int, help="serve by one CPU slice of so many threads")
    parser.add_argument("--users", type=int, nargs="+", default=[32], help="one after the other")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args()
    with _server(given) as (url, model):
        processors = None if given.cpu_threads is None else Processors(url)
        measured = [
            asyncio.run(measure(url, model, users, given.tokens, given.rounds, processors))
            for users in given.users
        ]
    found = (
        measured[0] if len(measured) == 1 else {f"users_{one['users']}": one for one in measured}
    )
    report(found, given.out, model=given.shape if given.url is None else model, serve=given.serve)


@contextmanager
def _server(given: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The address of a server, and a model's name there."""
    if given.url:
        yield given.url, given.model
        return
    with tempfile.TemporaryDirectory(dir=given.work or Path("/dev/shm")) as work:
        made = pick(1, 1 << 60, 1, ((given.shape, 1),))
        catalog = write_catalogue(Path(work) / "catalogue", made)
        model = made.entries[0].id
        _set_vocabulary(catalog.parent / given.shape, config_of(given.shape).vocab)
        arguments = ["--pool-dir", work, "--pool-bytes", str(2 * made.bytes)]
        if given.cpu_threads is not None:
            arguments += ["--gpu-slices", "none", "--slices", "1"]
            arguments += ["--threads", str(given.cpu_threads)]
        with Server(catalog, Path(work) / "log", arguments + shlex.split(given.serve)) as server:
            server.wait_ready(_READY_S)
            yield server.url, model


def _set_vocabulary(folder: Path, vocab: int) -> None:
    """Make every byte a token, and the last token the end; the others are random texts, of letters
    about as often as words have them."""
    rng = random.Random(0)
    tokens = dict.fromkeys(sorted(ByteLevel.alphabet()))
    while len(tokens) < vocab - 1:
        tokens["".join(rng.choices(_LETTERS, k=rng.randint(2, 7)))] = None
    tokens[_END] = None
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.add_special_tokens([_END])
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": vocab - 1}))


if __name__ == "__main__":
    main()
