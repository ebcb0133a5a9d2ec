"""First tokens on a live server whose slice had the prompt before (MMA's figure 15): JSON.

python benchmarks/prefix_tier.py [--shape llama-8b] [--tokens 16384,32768,65536] [--paths 1,2]
    [--out FILE]
python benchmarks/prefix_tier.py --cpu --shape tiny-llama --tokens 256,512

computed   the slice never had the prompt
host       its KV was pushed out of the arena, and comes from host memory: over one path, or over
           two with a GPU beside it that lends its link
arena      it is still in the arena

Each prompt asks for one token, so an answer's time is its first token's. Other prompts fill the
arena between two of them. A server for each number of paths runs after the one before. The exit
status is 1 if a prompt was not found where it should be, or an answer's log-probability differs by
more than 0.1.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from catalogue_files import Pick, pick, write_catalogue
from catalogue_server import Server, ServerFailed
from gpu_models import SHAPES, config_of, weight_bytes
from report import report

from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.kernels.layer import KvLayout

_LENT_BYTES = 1 << 30
"""Of the GPU beside, which lends its link with it."""
_SLAB = 2 << 20
_CPU_ARENA, _GPU_ARENA = 1.25, 2.2
"""The arena over the longest prompt; on GPUs over the larger of that and the weights. There cached
prefixes have half of it while the weights fit beside them."""
_READY_S, _ANSWER_S = 300.0, 120.0
_SETTLED_S = 0.3
"""A slice tells what it counted shortly after its answers."""
_LOGPROB_MOST = 0.1
_ID_LOW, _ID_HIGH = 5, 500
Rows = list[dict[str, Any]]


class Difference(AssertionError):
    """A prompt was not found where it should be, or its answer differs."""


class Asking:
    """A client of one server."""

    def __init__(self, server: Server, model: str, fills: Sequence[list[int]]) -> None:
        """`fills`: prompts that fill the arena."""
        self._server, self._model, self._fills = server, model, fills
        self._http = httpx.Client(timeout=_ANSWER_S)

    def ask(self, prompt: Sequence[int]) -> tuple[float, int, float]:
        """Return the seconds of an answer, the tokens that were not computed for it, and the
        log-probability of its token. Raises httpx.HTTPError."""
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0,
                "logprobs": 1, "ignore_eos": True}  # fmt: skip
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        began_s = time.perf_counter()
        answer = self._http.post(
            f"{self._server.url}/v1/completions", content=data, headers=headers
        )
        took_s = time.perf_counter() - began_s
        answer.raise_for_status()
        found = answer.json()
        details = found["usage"].get("prompt_tokens_details") or {}
        [logprob] = found["choices"][0]["logprobs"]["token_logprobs"]
        return took_s, details.get("cached_tokens") or 0, logprob

    def measure(self, tokens: int, repeats: int, paths: int) -> dict[str, Any]:
        """Return the times of prompts of so many tokens. Raises `Difference`."""
        times: dict[str, list[float]] = {"computed": [], "host": [], "arena": []}
        for repeat in range(repeats):
            prompt = prompt_of(tokens, 1000 * paths + repeat + 1)
            logprobs: list[float] = []
            for where in times:
                for fill in self._fills if where == "host" else ():
                    self.ask(fill)
                before = self._brought_tokens()
                took_s, cached, logprob = self.ask(prompt)
                came = self._brought_tokens() - before
                check(where, tokens, cached, came)
                times[where].append(took_s)
                logprobs.append(logprob)
            if max(logprobs) - min(logprobs) > _LOGPROB_MOST:
                raise Difference(f"{tokens} tokens: log-probabilities {logprobs}")
        return {"tokens": tokens, "paths": paths} | {
            f"{where}_s": median(seconds) for where, seconds in times.items()
        }

    def _brought_tokens(self) -> float:
        """Return the tokens that came from the host so far, once the slice has told all."""
        last = -1.0
        while True:
            metrics = self._server.metrics()
            found = metrics["c2cserve:slice_cached_host_tokens_total"]
            if found == last and not self._server.state()["running"]:
                return found
            last = found
            time.sleep(_SETTLED_S)


def prompt_of(tokens: int, seed: int) -> list[int]:
    rng = random.Random(f"{tokens} {seed}")
    return [rng.randrange(_ID_LOW, _ID_HIGH) for _ in range(tokens)]


def check(where: str, tokens: int, cached: int, came: float) -> None:
    """Raise `Difference` if a prompt was not found where it should be. `came`: tokens from the
    host. The last token is computed in any case."""
    reusable = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    expected = {"computed": (0, 0), "host": (reusable, reusable), "arena": (reusable, 0)}[where]
    if (cached, came) != expected:
        raise Difference(
            f"{tokens} tokens, {where}: {cached} were cached and {came:g} of them on the host,"
            f" {expected[0]} and {expected[1]} should be"
        )


def compared(rows: Rows) -> Rows:
    """Return ratios: computing over bringing, and one path over more."""
    one = {row["tokens"]: row["host_s"] for row in rows if row["paths"] == 1}
    return [
        row | {"over_computing": row["computed_s"] / row["host_s"]}
        | ({"over_one_path": one[row["tokens"]] / row["host_s"]} if row["tokens"] in one else {})
        for row in rows
    ]  # fmt: skip


class Room:
    """Memory in which what is cached goes when others come, and stays when nothing does."""

    def __init__(self, given: argparse.Namespace, block_bytes: int) -> None:
        longest = max(given.tokens) // BLOCK_TOKENS * block_bytes
        if given.cpu:
            self.arena_bytes = cached = -(-int(_CPU_ARENA * longest) // _SLAB) * _SLAB
        else:
            self.arena_bytes = int(_GPU_ARENA * max(longest, weight_bytes(given.shape)))
            cached = self.arena_bytes // 2
        self.fills = cached // longest + 1
        self.host_bytes = 2 * (self.fills + 1) * longest
        """Copies of running requests may have half of it."""

    def arguments(self, given: argparse.Namespace, paths: int) -> list[str]:
        """Return what the server is started with."""
        host = ["--host-kv-bytes", str(self.host_bytes), "--patience", "0"]
        if given.cpu:
            arena = ["--kv-bytes", str(self.arena_bytes)]
            return ["--gpu-slices", "none", "--slices", "1", *arena, *host]
        lent = ["--gpu-peer-bytes", str(_LENT_BYTES)] if paths > 1 else []
        arena = ["--gpu-kv-bytes", str(self.arena_bytes)]
        return ["--gpu-slices", "whole@0", *arena, *lent, *host]


def run(given: argparse.Namespace, work: Path) -> Rows:
    """Run a server for each number of paths."""
    made = pick(1, 1 << 60, 1, ((given.shape, 1),))
    catalog = catalogue_of(work, made, given)
    config = config_of(given.shape)
    block_bytes = KvLayout(
        config.layers, config.kv_heads, config.head_dim, config.dtype
    ).block_bytes
    room = Room(given, block_bytes)
    fills = [prompt_of(max(given.tokens), -1 - number) for number in range(room.fills)]
    rows: Rows = []
    for paths in given.paths:
        arguments = [
            "--pool-dir", str(work), "--pool-bytes", str(made.bytes + (128 << 20)),
            *room.arguments(given, paths), *given.serve.split(),
        ]  # fmt: skip
        with Server(catalog, work / f"log-{paths}", arguments) as server:
            server.wait_ready(_READY_S, print)
            asking = Asking(server, made.entries[0].id, fills)
            for fill in fills:  # whatever is done once
                asking.ask(fill)
            for tokens in given.tokens:
                row = asking.measure(tokens, given.repeats, paths)
                row["bytes"] = (tokens - 1) // BLOCK_TOKENS * block_bytes
                print(" ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
                rows.append(row)
    return compared(rows)


def catalogue_of(work: Path, made: Pick, given: argparse.Namespace) -> Path:
    """Write a catalogue whose model takes the longest of the prompts."""
    folder = work / "catalogue"
    catalog = write_catalogue(folder, made)
    path = folder / given.shape / "config.json"
    longest = max(given.tokens) + 1024
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": longest}))
    return catalog


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--tokens", default="16384,32768,65536", help="of prompts")
    parser.add_argument("--paths", default="1", help="1: the GPU's own link; 2: a neighbour's too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="a CPU slice, to try it without a GPU")
    parser.add_argument("--serve", default="", help="more arguments of `c2cserve serve`")
    parser.add_argument("--work", type=Path, help="for checkpoints and pools; /dev/shm")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    given.tokens = sorted(int(one) for one in given.tokens.split(","))
    given.paths = sorted(int(one) for one in given.paths.split(","))
    began_s = time.monotonic()
    results: dict[str, Any] = {"rows": [], "failed": ""}
    with tempfile.TemporaryDirectory(dir=given.work or Path("/dev/shm")) as work:
        try:
            results["rows"] = run(given, Path(work))
        except (Difference, ServerFailed, httpx.HTTPError) as fault:
            results["failed"] = f"{type(fault).__name__}: {fault}"
    results["wall_s"] = time.monotonic() - began_s
    report(
        results, given.out, shape=given.shape, tokens=given.tokens, paths=given.paths,
        repeats=given.repeats, serve=given.serve,
    )  # fmt: skip
    if results["failed"]:
        raise SystemExit(results["failed"])


if __name__ == "__main__":
    main()
