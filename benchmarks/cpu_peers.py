"""c2cserve, llama.cpp and vLLM on the same cores, over HTTP, in turns: prompts and decoding.

    python benchmarks/cpu_peer_model.py FOLDER
    python benchmarks/cpu_peers.py FOLDER [--llama llama-server] [--vllm PYTHON]
                                   [--threads N] [--runs 5] [--prompts 128,512,2048]
                                   [--batches 1,4,16] [--tokens 64] [--clock wall] [--out FILE]

`--llama` is llama.cpp's own server, built on this machine (`cmake -DGGML_NATIVE=ON`): the one of
llama-cpp-python decodes one request at a time. `--vllm` is the Python of an environment with vLLM's
build for CPUs. All serve FOLDER's model, are up for the whole run, and take no cores while idle. In
every second round the last of them is first.

On a machine with other work, `--clock processor --threads 1` counts the seconds of processor time
that all processes of a server together took, instead of those on the wall. With more threads a
server that waits in a loop takes processor time for waiting.

    prompt   tokens of a prompt per second until its first token: one request, no prefix in a cache
    decode   tokens per second of a number of requests at a time, each from its first token on
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import report

LIMIT_S = 600.0
REST_S = 1.0
"""Before each measurement: llama.cpp's threads go on polling for a while after an answer."""
DECODE_PROMPT = 32
OURS = "c2cserve"
_WORDS = (
    "the of and to in is for on that by this with you it not or be are from at as your all have "
    "new more an was we will home can us about if page my has search free but our one other do no "
    "time they site he up may what which their news out use any there see only so his when here"
)
WORDS = _WORDS.split()
"""One token each, in most vocabularies, with the space before it."""


Clock = Callable[[int], float]
"""Seconds, of a server whose first process is given."""


def wall_s(_pid: int) -> float:
    return time.perf_counter()


def processor_s(pid: int) -> float:
    """Return what a process and its descendants have run so far; ended ones no longer count."""
    total, pids = 0.0, [pid]
    while pids:
        for task in Path(f"/proc/{pids.pop()}/task").glob("*"):
            with contextlib.suppress(OSError):  # it has just ended
                total += int((task / "schedstat").read_text().split()[0]) / 1e9
                pids += map(int, (task / "children").read_text().split())
    return total


CLOCKS: dict[str, Clock] = {"wall": wall_s, "processor": processor_s}


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    port: int
    model: str
    pid: int
    clock: Clock

    def now(self) -> float:
        return self.clock(self.pid)

    def complete(self, prompt: str, tokens: int) -> tuple[int, list[float]]:
        """Return the prompt's length in tokens, and when each token came."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        times: list[float] = []
        length = 0
        with contextlib.closing(connection):
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                sys.exit(f"{self.name}: {answer.status} {answer.read()[:500]!r}")
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if usage := chunk.get("usage"):
                    length = usage["prompt_tokens"]
                if chunk.get("choices") and len(times) < tokens:
                    times.append(self.now())
        return length, times


def text(words: int, rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def prompt_rate(server: Server, words: int, rng: random.Random) -> float:
    prompt, began = text(words, rng), server.now()
    length, times = server.complete(prompt, 1)
    return length / (times[0] - began)


def decode_rate(server: Server, batch: int, tokens: int, rng: random.Random) -> float:
    prompts = [text(DECODE_PROMPT, rng) for _ in range(batch)]
    with ThreadPoolExecutor(batch) as executor:
        answers = list(executor.map(server.complete, prompts, [tokens] * batch))
    return sum((tokens - 1) / (times[-1] - times[0]) for _, times in answers)


@dataclass(frozen=True, slots=True)
class Peer:
    """How a server is started; `--port N` is added."""

    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict[str, str])


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def running(peer: "Peer", port: int, model: str, clock: Clock) -> Generator[Server]:
    name, command = peer.name, [*peer.command, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | peer.env)
    try:
        end = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
                with contextlib.closing(connection):
                    connection.request("GET", "/health")
                    if connection.getresponse().status == 200:
                        break
            if process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{name} does not start: {' '.join(command)}")
            time.sleep(0.1)
        yield Server(name, port, model, process.pid, clock)
    finally:
        process.terminate()
        process.wait()


def _numbers(given: str) -> list[int]:
    return [int(one) for one in given.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="that cpu_peer_model.py wrote")
    parser.add_argument("--llama", help="llama.cpp's server program")
    parser.add_argument("--vllm", help="Python of an environment with vLLM's build for CPUs")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--prompts", default=[128, 512, 2048], type=_numbers)
    parser.add_argument("--batches", default=[1, 4, 16], type=_numbers)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--out", type=Path, help="JSON")
    return parser.parse_args()


Rates = dict[tuple[str, int, str], list[float]]


def measure(
    servers: Sequence[Server], given: argparse.Namespace, rng: random.Random, rates: Rates
) -> None:
    """One round: all prompts and all batches, of the servers in turns."""
    for size in given.prompts:
        for server in servers:
            time.sleep(REST_S)
            rate = prompt_rate(server, size, rng)
            rates.setdefault(("prompt", size, server.name), []).append(rate)
    for batch in given.batches:
        for server in servers:
            time.sleep(REST_S)
            rate = decode_rate(server, batch, given.tokens, rng)
            rates.setdefault(("decode", batch, server.name), []).append(rate)


def medians(rates: Rates) -> list[dict[str, Any]]:
    """Return a row for each kind and size: our median rate, and each peer's beside it."""
    rows: list[dict[str, Any]] = []
    for (kind, size, name), ours in rates.items():
        if name != OURS:
            continue
        mine = statistics.median(ours)
        row = {"of": kind, "size": size, "tokens_per_s": mine, "spread": [min(ours), max(ours)]}
        for (other_kind, other_size, peer), theirs in rates.items():
            if (other_kind, other_size) == (kind, size) and peer != OURS:
                rate = statistics.median(theirs)
                row |= {f"{peer}_tokens_per_s": rate, f"times_{peer}": mine / rate}
        rows.append(row)
    return rows


def peers(given: argparse.Namespace, model: str) -> list[Peer]:
    """Return how each server is started, ours first."""
    threads, most = str(given.threads), max(given.batches)
    context = max(max(given.prompts) + 256, given.tokens + DECODE_PROMPT + 64)
    started = [Peer(OURS, [
        sys.executable, "-m", "c2cserve.cli.main", "serve", "--catalog",
        str(given.folder / "catalog.toml"), "--slices", "1", "--threads", threads,
        "--gpu-slices", "none", "--log-level", "error",
    ])]  # fmt: skip
    if given.llama:
        started.append(Peer("llama", [
            given.llama, "--model", str(given.folder / "model.gguf"), "--threads", threads,
            "--threads-batch", threads, "--parallel", str(most), "--ctx-size", str(most * context),
        ]))  # fmt: skip
    if given.vllm:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: given.threads]))
        started.append(Peer("vllm", [
            given.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model",
            str(given.folder / "models" / model), "--served-model-name", model, "--dtype",
            "bfloat16", "--max-model-len", str(context), "--max-num-seqs", str(most),
            "--no-enable-prefix-caching",
        ], {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}))  # fmt: skip
    return started


def main() -> None:
    given = arguments()
    [model] = (path.name for path in (given.folder / "models").iterdir())
    rng, clock = random.Random(0), CLOCKS[given.clock]
    rates: Rates = {}
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(running(peer, free_port(), model, clock))
            for peer in peers(given, model)
        ]
        for server in servers:  # warming up
            decode_rate(server, 1, 8, rng)
        for run in range(1, given.runs + 1):
            measure(servers if run % 2 else servers[::-1], given, rng, rates)
            # After each round: what a run that is ended has measured is not lost.
            report(
                {"served": medians(rates)}, given.out, show=run == given.runs,
                threads=given.threads, runs=run, tokens=given.tokens, clock=given.clock,
            )  # fmt: skip


if __name__ == "__main__":
    main()
