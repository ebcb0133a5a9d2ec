"""What the whole server adds to the bare engine: time to first token and throughput, the same
model, cores and requests, in one run.

    python benchmarks/server_vs_engine.py [--layers 4 | --checkpoint DIR] [--out FILE.json]

What the server adds to a first token does not depend on the model: with a small checkpoint (one of
examples/specialists) it is not lost in the model's own noise.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import aiohttp
from cpu_llm import make_checkpoint
from local_engine import LocalEngine
from report import report

PROMPT, OUTPUT, BATCH = 32, 24, 8
SPECIALISTS = Path(__file__).parent.parent / "examples" / "specialists"


def prompt(rng: random.Random) -> list[int]:
    """Ids that every vocabulary has."""
    return [rng.randrange(3, 200) for _ in range(PROMPT)]


def engine_ttft_s(engine: LocalEngine, rng: random.Random) -> float:
    work = prompt(rng)
    start = time.perf_counter()
    (answer,) = engine.run([work], [1])
    return answer.first_s - start


def engine_tokens_per_s(engine: LocalEngine, rng: random.Random) -> float:
    work = [prompt(rng) for _ in range(BATCH)]
    start = time.perf_counter()
    engine.run(work, [OUTPUT] * BATCH)
    return BATCH * OUTPUT / (time.perf_counter() - start)


class Server:
    """`c2cserve serve` with one slice of all cores."""

    def __init__(self, checkpoint: Path, cpus: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        catalog = checkpoint.parent / "catalog.toml"
        catalog.write_text(
            f'[[models]]\nid = "m"\npath = "{checkpoint}"\nttft_s = 1000.0\ntpot_s = 1000.0\n'
        )
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "c2cserve.cli.main", "serve", "--catalog", str(catalog),
                "--port", str(port), "--slices", "1", "--threads", str(cpus),
                "--log-level", "warning", "--gpu-slices", "none",
            ]
        )  # fmt: skip
        while not self._ready():
            assert self.process.poll() is None, "the server ended"
            time.sleep(0.1)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/admin/state") as answer:
                state = json.loads(answer.read())
        except urllib.error.URLError:
            return False
        up = all(one["state"] == "up" for one in state["slices"])
        return up and state["models"][0]["state"] == "ready"

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    async def _ask(self, session: aiohttp.ClientSession, work: list[int], tokens: int) -> float:
        body = {
            "model": "m", "prompt": work, "temperature": 0, "max_tokens": tokens, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        start, first = time.perf_counter(), 0.0
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {") and not first:
                    first = time.perf_counter() - start
        return first

    async def _all(self, work: list[list[int]], tokens: int) -> list[float]:
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(self._ask(session, one, tokens) for one in work))

    def ttft_s(self, rng: random.Random) -> float:
        return asyncio.run(self._all([prompt(rng)], 1))[0]

    def tokens_per_s(self, rng: random.Random) -> float:
        work = [prompt(rng) for _ in range(BATCH)]
        start = time.perf_counter()
        asyncio.run(self._all(work, OUTPUT))
        return BATCH * OUTPUT / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    rng = random.Random(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if arguments.checkpoint is None:
            checkpoint = make_checkpoint(Path(folder), arguments.layers)
            # Prompts are token ids; any tokenizer will do to show the answers.
            shutil.copy(SPECIALISTS / "sorter-llama" / "tokenizer.json", checkpoint)
        else:
            checkpoint = shutil.copytree(arguments.checkpoint, Path(folder) / "model")
        engine, server = LocalEngine(checkpoint, cpus), Server(checkpoint, len(cpus))
        ttft: dict[str, list[float]] = {"engine": [], "server": []}
        rate: dict[str, list[float]] = {"engine": [], "server": []}
        try:
            for _ in range(arguments.rounds):  # taking turns, so that drift hits both
                ttft["engine"].append(engine_ttft_s(engine, rng))
                ttft["server"].append(server.ttft_s(rng))
            for _ in range(max(3, arguments.rounds // 3)):
                rate["engine"].append(engine_tokens_per_s(engine, rng))
                rate["server"].append(server.tokens_per_s(rng))
        finally:
            server.close()
            engine.close()
    # Of neighbours in time: other work on the machine moves both by far more than they differ.
    pairs = zip(ttft["server"], ttft["engine"], strict=True)
    quartiles = statistics.quantiles([(server - bare) * 1e3 for server, bare in pairs])
    results = {
        "ttft_p50_ms": {name: statistics.median(values) * 1e3 for name, values in ttft.items()},
        "server_adds_ttft_ms": dict(zip(("p25", "p50", "p75"), quartiles, strict=True)),
        "tokens_per_s_best": {name: max(values) for name, values in rate.items()},
        "throughput_ratio": max(rate["server"]) / max(rate["engine"]),
    }
    report(
        results, arguments.out, rounds=arguments.rounds,
        model=str(arguments.checkpoint or f"{arguments.layers} layers of a Llama 1B"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
