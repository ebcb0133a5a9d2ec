"""What a key notices of another one whose loops never rest: requests of 128 choices each.

python benchmarks/fair_keys.py [--catalog examples/specialists/catalog.toml] [--rounds 4]
    [--requests 40] [--loops 3] [--choices 128] [--serve "--slices 2"] [--out FILE]

`c2cserve serve` has two keys. In each round the second one sends requests one after the other:
first alone, then beside loops of the first key. These ask for many choices at a time, and at once
again after each answer or refusal. The loops run in a process of their own. Results are the time
per request and refusals for load of the second key, and what the loops got.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from catalogue_server import Server, exit_on_sigterm
from report import report

ROOT = Path(__file__).parent.parent
_KEYS = ("sk-loops", "sk-second")
_OUTPUT = 32
_READY_S = 120.0
_FIRST_S = 2.0
"""The loops have so long to fill the server."""


class Caller:
    """One connection of a key."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self._address = urlsplit(url).netloc
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._model = model
        self._connection = http.client.HTTPConnection(self._address, timeout=120)

    def ask(self, choices: int) -> int:
        """Return the status."""
        body = {
            "model": self._model, "prompt": "sort: q w e r t y =", "max_tokens": _OUTPUT,
            "n": choices, "temperature": 1.0, "ignore_eos": True,
        }  # fmt: skip
        self._connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status not in {200, 429}:
            raise RuntimeError(f"{answer.status}: {content[:500]!r}")
        return answer.status


def _loops(url: str, model: str, loops: int, choices: int, over: Any, counts: Any) -> None:
    """Ask until `over`; put how often each status came."""
    statuses = Counter[int]()

    def loop() -> None:
        caller = Caller(url, _KEYS[0], model)
        while not over.is_set():
            statuses[caller.ask(choices)] += 1

    threads = [threading.Thread(target=loop) for _ in range(loops)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    counts.put(dict(statuses))


def _second(caller: Caller, requests: int) -> dict[str, Any]:
    times_s: list[float] = []
    refused = 0
    for _ in range(requests):
        began_s = time.monotonic()
        refused += caller.ask(1) == 429
        times_s.append(time.monotonic() - began_s)
    p99 = sorted(times_s)[int(0.99 * (len(times_s) - 1))]
    return {"p50_s": statistics.median(times_s), "p99_s": p99, "refused": refused}


def _round(url: str, model: str, given: argparse.Namespace) -> dict[str, Any]:
    caller = Caller(url, _KEYS[1], model)
    alone = _second(caller, given.requests)
    spawn = multiprocessing.get_context("spawn")
    over, counts = spawn.Event(), spawn.Queue()
    others = spawn.Process(
        target=_loops, args=(url, model, given.loops, given.choices, over, counts), daemon=True
    )
    others.start()
    time.sleep(_FIRST_S)
    began_s = time.monotonic()
    beside = _second(caller, given.requests)
    seconds = time.monotonic() - began_s
    over.set()
    statuses = counts.get()
    others.join()
    return {
        "alone": alone, "beside": beside, "ratio": beside["p50_s"] / alone["p50_s"],
        "seconds": seconds, "loops_answered": statuses.get(200, 0),
        "loops_refused": statuses.get(429, 0),
    }  # fmt: skip


def main() -> None:
    exit_on_sigterm()
    given = _arguments(sys.argv[1:])
    os.environ["C2CSERVE_API_KEYS"] = ",".join(_KEYS)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with Server(given.catalog, log, shlex.split(given.serve)) as server:
            server.wait_ready(_READY_S)
            _second(Caller(server.url, _KEYS[1], given.model), 8)
            rounds = [_round(server.url, given.model, given) for _ in range(given.rounds)]
    results = {
        "rounds": rounds, "ratio": statistics.median(one["ratio"] for one in rounds),
        "refused": sum(one["beside"]["refused"] for one in rounds),
    }  # fmt: skip
    report(results, given.out, requests=given.requests, loops=given.loops, choices=given.choices)


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    catalog = ROOT / "examples/specialists/catalog.toml"
    parser.add_argument("--catalog", type=Path, default=catalog)
    parser.add_argument("--model", default="sorter-llama")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=40, help="of the second key, each time")
    parser.add_argument("--loops", type=int, default=3)
    parser.add_argument("--choices", type=int, default=128)
    parser.add_argument("--serve", default="--slices 2", help="options of `serve`, one string")
    parser.add_argument("--out", type=Path, help="JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
