"""Closed loops over HTTP: how many tokens a server gives, and how fast, at 1 to 256 users.

python benchmarks/closed_loop.py [--shape llama-8b] [--users 1,8,32,64,128,256] [--prompt 512]
    [--output 128] [--serve ARGUMENTS] [--work DIR] [--out FILE]
python benchmarks/closed_loop.py --url http://127.0.0.1:8101 --model m

A random model of the shape is written to DIR and served by `c2cserve serve` with the ARGUMENTS (one
string). With --url any OpenAI server is measured instead, under the same clients. Each user sends
one request after another to `/v1/completions`: a prompt of random token ids, so nothing is cached
and nothing is tokenized, greedy, exactly --output tokens, streamed.

Of each number of users: output tokens per second, time to first token, time per output token (mean
of a request after its first), and how many requests failed. Requests that are under way before all
users have begun count too: users begin at the same moment, which is the hardest start there is.
"""

import argparse
import asyncio
import json
import random
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from catalogue_files import pick, write_catalogue
from catalogue_server import Server
from gpu_models import SHAPES, config_of
from report import report

from c2cserve.bench.loadgen import Load, Outcome, Planned
from c2cserve.bench.loadgen_processes import generate_with
from c2cserve.bench.loadgen_reply import Record

_PROCESSES = 4
"""That send: one alone is the limit from some 100 users on."""
_REQUESTS_EACH = 4
_REQUESTS = range(6, 769)
"""At least and at most in a loop, whatever the number of users."""
_READY_S = 180.0
_LOWEST_ID = 10
"""Of prompts: what comes before may be special."""


def main() -> None:
    given = _arguments()
    if given.url:
        rows = measure(given.url, [given.model], given.vocab, given)
        report({"rows": rows}, given.out, **_parameters(given))
        return
    with _served(given) as (server, model):
        rows = measure(server.url, [model], config_of(given.shape).vocab, given)
        counters = {name: value for name, value in server.metrics().items() if "slice_" in name}
    report({"rows": rows, "counters": counters}, given.out, **_parameters(given))


def _arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--users", default="1,8,32,64,128,256")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--serve", default="", help="arguments of `c2cserve serve`, one string")
    parser.add_argument("--work", type=Path, help="for the checkpoint and the pool; /dev/shm")
    parser.add_argument("--url", help="measure this server instead")
    parser.add_argument("--model", default="m", help="its name there")
    parser.add_argument("--vocab", type=int, default=32_000, help="of that model, at least")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    given.users = [int(count) for count in given.users.split(",")]
    return given


def _parameters(given: argparse.Namespace) -> dict[str, object]:
    return {
        "shape": given.shape, "prompt": given.prompt, "output": given.output, "serve": given.serve,
        "url": given.url,
    }  # fmt: skip


@contextmanager
def _served(given: argparse.Namespace) -> Iterator[tuple[Server, str]]:
    """A server with one random model, and the model's name."""
    with tempfile.TemporaryDirectory(dir=given.work or Path("/dev/shm")) as work:
        made = pick(1, 1 << 60, 1, ((given.shape, 1),))
        catalog = write_catalogue(Path(work) / "catalogue", made)
        arguments = [
            "--pool-dir", work, "--pool-bytes", str(2 * made.bytes), *shlex.split(given.serve)
        ]  # fmt: skip
        with Server(catalog, Path(work) / "log", arguments) as server:
            server.wait_ready(_READY_S)
            yield server, made.entries[0].id


def measure(
    url: str, models: Sequence[str], vocab: int, given: argparse.Namespace
) -> list[dict[str, float | int]]:
    """A row for each number of users, printed as it is measured. Their requests ask for the models
    in turn. A short loop goes before them: whatever is loaded or captured at first use is none of
    theirs."""
    _loop(url, models, vocab, 4, given, requests=max(8, len(models)))
    rows: list[dict[str, float | int]] = []
    for users in given.users:
        requests = max(_REQUESTS[0], min(_REQUESTS[-1], users * _REQUESTS_EACH))
        rows.append(_row(users, _loop(url, models, vocab, users, given, requests).records))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _loop(
    url: str,
    models: Sequence[str],
    vocab: int,
    users: int,
    given: argparse.Namespace,
    requests: int,
) -> Outcome:
    rng = random.Random(users)
    asked = [models[i % len(models)] for i in range(requests)]
    planned = [
        Planned(i, model, _body(rng, model, vocab, given.prompt, given.output))
        for i, model in enumerate(asked)
    ]
    load = Load(url, "/v1/completions", planned, concurrency=users)
    return asyncio.run(generate_with(load, min(_PROCESSES, users), lambda _: None))


def _body(rng: random.Random, model: str, vocab: int, prompt: int, output: int) -> bytes:
    body: dict[str, Any] = {
        "model": model, "prompt": [rng.randrange(_LOWEST_ID, vocab) for _ in range(prompt)],
        "max_tokens": output, "ignore_eos": True, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    return json.dumps(body).encode()


def _row(users: int, records: Sequence[Record]) -> dict[str, float | int]:
    done = [record for record in records if record.ok]
    row: dict[str, float | int] = {
        "users": users, "requests": len(done), "failed": len(records) - len(done)
    }  # fmt: skip
    if not done:
        return row
    span_s = max(record.end_s for record in done) - min(record.sent_s for record in done)
    row["output_tokens_per_s"] = sum(record.output_tokens for record in done) / span_s
    first_s = sorted(record.ttft_s for record in done)
    each_s = sorted(tpot_s for record in done if (tpot_s := record.tpot_s) is not None)
    for name, values in (("ttft", first_s), ("tpot", each_s)):
        for share in (50, 99):
            if values:
                at = min(len(values) - 1, len(values) * share // 100)
                row[f"{name}_p{share}_ms"] = 1e3 * values[at]
    return row


if __name__ == "__main__":
    main()
