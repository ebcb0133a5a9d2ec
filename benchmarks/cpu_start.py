"""Seconds from the start of a server to its first token, over HTTP, and the processor time that it
takes: of all of its processes, until then. On a machine with other work only the latter says much.

    python benchmarks/cpu_start.py [--catalog FILE] [--runs 5] [--source DIR ...] [--out FILE]

`--source`: source trees to compare (`src` folders), which take turns. The model is the first one of
the catalogue. A start ends with the answer of one token; files are in the page cache but at the
first run.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from report import report

ROOT = Path(__file__).parent.parent
LIMIT_S = 120.0
POLL_S = 0.005
_SESSION, _TIMES = 3, slice(11, 15)
"""Fields of /proc/PID/stat after the name."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ask(url: str, body: dict[str, object] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)


def processor_s(session: int) -> float:
    """Return the time that processors gave to a session: to its processes, and to those of their
    children that have ended."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[_SESSION]) == session:
                    ticks += sum(map(int, fields[_TIMES]))
    return ticks / os.sysconf("SC_CLK_TCK")


def first_token_s(source: Path, catalog: Path) -> tuple[float, float, float]:
    """Return when the server listens, when the first token has come, and the processor time."""
    port = free_port()
    url, began = f"http://127.0.0.1:{port}/v1", time.monotonic()
    command = [sys.executable, "-m", "c2cserve.cli.main", "serve", "--catalog", str(catalog)]
    server = subprocess.Popen(
        [*command, "--port", str(port), "--log-level", "error"],
        env={**os.environ, "PYTHONPATH": str(source)},
        start_new_session=True,
    )
    try:
        model = None
        while model is None:
            with contextlib.suppress(urllib.error.URLError):
                model = ask(f"{url}/models")["data"][0]["id"]
            if server.poll() is not None or time.monotonic() - began > LIMIT_S:
                sys.exit(f"the server of {source} does not answer")
            time.sleep(POLL_S)
        listening_s = time.monotonic() - began
        ask(f"{url}/completions", {"model": model, "prompt": "Hello", "max_tokens": 1})
        first_s = time.monotonic() - began
        return listening_s, first_s, processor_s(server.pid)
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = ROOT / "examples" / "specialists" / "catalog.toml"
    parser.add_argument("--catalog", type=Path, default=default)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--source", type=Path, nargs="+", default=[ROOT / "src"])
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args()
    taken: dict[Path, list[tuple[float, float, float]]] = {source: [] for source in given.source}
    for _ in range(given.runs):
        for source in given.source:
            taken[source].append(first_token_s(source, given.catalog))
    results = [
        {
            "source": number,
            "listening_s": statistics.median(one[0] for one in runs),
            "first_token_s": statistics.median(one[1] for one in runs),
            "fastest_s": min(one[1] for one in runs),
            "processor_s": statistics.median(one[2] for one in runs),
            "processor_least_s": min(one[2] for one in runs),
        }
        for number, runs in enumerate(taken.values())
    ]
    report({"starts": results}, given.out, runs=given.runs)


if __name__ == "__main__":
    main()
