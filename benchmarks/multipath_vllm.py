"""vLLM's sleep and wake, with several links and without: times, and answers before and after.

python benchmarks/multipath_vllm.py CHECKPOINT [--turns 5] [--utilization 0.4] [--kv-bytes N]
    [--out FILE]

vLLM is what `python -m vllm.entrypoints.openai.api_server` finds. Two of it start at
the same time, on GPU 0. One is measured while the other has nothing to do.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from report import report

from c2cserve.transfer.multipath import multipath_environment

SPREAD = "c2cserve multipath: copies take several links"
"""What the library says of the first one. A server's processes may end without the sums."""

_UP_WITHIN_S = 280
_PROMPTS = [[7 * number + place for place in range(64)] for number in range(1, 9)]
_SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1",
}  # fmt: skip


class Server(NamedTuple):
    url: str
    process: "subprocess.Popen[bytes]"


def ask(url: str, body: dict[str, Any] | None = None, *, get: bool = False) -> bytes:
    data = None if get else json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.read()


def answers(url: str) -> list[str]:
    """Greedy answers, one at a time, so that batches are alike."""
    found: list[str] = []
    for prompt in _PROMPTS:
        body = {"model": "m", "prompt": prompt, "max_tokens": 32, "temperature": 0,
                "ignore_eos": True}  # fmt: skip
        found.append(json.loads(ask(f"{url}/v1/completions", body))["choices"][0]["text"])
    return found


@contextlib.contextmanager
def vllm(given: argparse.Namespace, log: Path, *, spread: bool) -> Generator[Server]:
    """A server that starts, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, **_SETTINGS}
    if spread:
        environment = multipath_environment(environment, report=True)
    opened = log.open("w")
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", given.checkpoint,
         "--served-model-name", "m", "--port", str(port), "--max-model-len", "4096",
         "--gpu-memory-utilization", str(given.utilization), "--kv-cache-memory-bytes",
         str(given.kv_bytes), "--enable-sleep-mode", "--no-enable-prefix-caching",
         "--enforce-eager"],
        env=environment, stdout=opened, stderr=opened, start_new_session=True,
    )  # fmt: skip
    try:
        yield Server(f"http://127.0.0.1:{port}", server)
    finally:
        os.killpg(server.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        opened.close()
        sys.stderr.write(log.read_text(errors="replace"))


def wait_up(server: Server) -> None:
    """Raises `TimeoutError`."""
    until = time.monotonic() + _UP_WITHIN_S
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            ask(f"{server.url}/health", get=True)
            return
        if server.process.poll() is not None or time.monotonic() > until:
            raise TimeoutError("vLLM does not come up; its log says why")
        time.sleep(1)


def measure(url: str, turns: int) -> dict[str, Any]:
    """The first turn sets up contexts and pinned memory, and does not count. Then as many turns
    wake the weights alone first: that has no memory to map for KV."""
    before = answers(url)
    times: dict[str, list[float]] = {"sleep_s": [], "wake_s": [], "wake_weights_s": []}
    for turn in range(2 * turns + 1):
        began = time.perf_counter()
        ask(f"{url}/sleep?level=1")
        slept = time.perf_counter()
        whole = turn <= turns
        ask(f"{url}/wake_up" if whole else f"{url}/wake_up?tags=weights")
        woken = time.perf_counter()
        if not whole:
            ask(f"{url}/wake_up?tags=kv_cache")
        if turn > 0:
            times["sleep_s"].append(slept - began)
            times["wake_s" if whole else "wake_weights_s"].append(woken - slept)
    return {**times, "before": before, "after": answers(url)}


def says_spread(log: Path) -> bool:
    """Whether the library said in the server's log that a copy took several links."""
    return SPREAD in log.read_text(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--utilization", type=float, default=0.4, help="of the GPU, for each")
    parser.add_argument("--kv-bytes", type=int, default=8 * 10**9, help="KV of each")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        logs = {name: Path(folder) / f"{name}.log" for name in ("plain", "spread")}
        with contextlib.ExitStack() as servers:
            up = {
                name: servers.enter_context(vllm(options, log, spread=name == "spread"))
                for name, log in logs.items()
            }
            for server in up.values():
                wait_up(server)
            for name, server in up.items():
                found[name] = measure(server.url, options.turns)
                found[name]["spread"] = says_spread(logs[name])
    said = [found[name][when] for name in found for when in ("before", "after")]
    ratios = {
        key: median(found["plain"][key]) / median(found["spread"][key])
        for key in ("sleep_s", "wake_s", "wake_weights_s")
    }
    equal = all(one == said[0] for one in said)
    by_links = found["spread"]["spread"] and not found["plain"]["spread"]
    bars = [
        {"bar": "wake: faster", "value": ratios["wake_s"], "bound": 1.5,
         "holds": ratios["wake_s"] >= 1.5},
        {"bar": "answers are equal", "value": equal, "bound": True, "holds": equal},
        {"bar": "copies took several links", "value": by_links, "bound": True, "holds": by_links},
    ]  # fmt: skip
    for one in found.values():
        del one["before"], one["after"]
    results = {**found, "faster": ratios, "bars": bars}
    report(results, options.out, checkpoint=Path(options.checkpoint).name)


if __name__ == "__main__":
    main()
