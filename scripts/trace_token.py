"""Which package borders a token crosses, measured: one server, two requests, every call seen.

A server with one CPU slice is started with a profile hook in each of its processes. The hook notes
every call, resumption and return between two packages of c2cserve, `core` apart: its types are
what is passed. A long answer less a short one, per token, is what a token costs; the rest is what a
request costs.

    scripts/trace_token [--model NAME] [--load] [--all] [--out FILE]

--load: how weights come into the pool and to the worker, from the server's start until all models
are up, instead of requests. --all: crossings that carry nothing, too. --out: the crossings as JSON.
"""

import argparse
import contextlib
import dis
import gc
import inspect
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TextIO

ROOT = Path(__file__).parents[1]
SOURCE = str(ROOT / "src" / "c2cserve") + os.sep
CATALOG = ROOT / "examples" / "specialists" / "catalog.toml"
SHORT, LONG = 8, 40
"""Output tokens of the two requests."""
READY_S = 120.0
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True, slots=True, order=True)
class Crossing:
    where: str
    """Process and thread."""
    caller: str
    callee: str
    """Modules without `c2cserve.`, and functions."""
    kind: str
    """`call`, `resume` (of a generator or a coroutine), `return`."""
    carried: tuple[str, ...]
    """Types of ours among the arguments, or of what comes back."""

    @property
    def border(self) -> tuple[str, str]:
        """The packages, in the direction in which what is carried goes."""
        caller, callee = self.caller.partition(".")[0], self.callee.partition(".")[0]
        return (callee, caller) if self.kind == "return" else (caller, callee)

    @property
    def carries(self) -> bool:
        return any(self.carried)


# ---- In each process of the server --------------------------------------------------------------


class Hook:
    """A profile function. It is quiet until the first byte of the folder's `on` is set."""

    def __init__(self, folder: Path) -> None:
        argv = " ".join(sys.orig_argv)
        self._process = "server"
        for name, sign in (("worker", "serving.worker.process"), ("text", "server.text.process")):
            if sign in argv:
                self._process = name
        with (folder / "on").open("r+b") as file:
            self._on = mmap.mmap(file.fileno(), 1)
        self._out: TextIO = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._names: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        caller = frame.f_back
        if self._on[0] == 0 or caller is None or event not in {"call", "return"}:
            return
        callee_name, caller_name = self._name(frame.f_code), self._name(caller.f_code)
        ends = {callee_name.partition(".")[0], caller_name.partition(".")[0]}
        if len(ends) == 1 or ends & {"", "core"}:
            return
        import threading

        carried = tuple(_types(frame)) if event == "call" else (_type(argument),)
        kind = "resume" if event == "call" and _resumed(frame) else event
        where = f"{self._process}/{threading.current_thread().name}"
        self._out.write(json.dumps([where, caller_name, callee_name, kind, carried]) + "\n")

    def _name(self, code: CodeType) -> str:
        """Module and function; nothing of functions outside the package."""
        name = self._names.get(code)
        if name is None:
            path = code.co_filename
            inside = path.removeprefix(SOURCE).removesuffix(".py").replace(os.sep, ".")
            name = f"{inside}:{code.co_qualname}" if path.startswith(SOURCE) else ""
            self._names[code] = name
        return name


def _resumed(frame: FrameType) -> bool:
    """Whether a generator or coroutine goes on: it begins at its first RESUME."""
    if not frame.f_code.co_flags & _GENERATORS:
        return False
    return frame.f_lasti > _start_of(frame.f_code)


@cache
def _start_of(code: CodeType) -> int:
    return next(part.offset for part in dis.get_instructions(code) if part.opname == "RESUME")


def _types(frame: FrameType) -> Iterator[str]:
    code = frame.f_code
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        if name != "self" and (found := _type(frame.f_locals.get(name))):
            yield found


def _type(value: object) -> str:
    """Return the name of a type of c2cserve's or torch's, or of the first in a container."""
    kind = type(value)
    if kind.__name__ == "async_generator_wrapped_value":
        return _type(gc.get_referents(value)[0])
    if isinstance(value, list | tuple):
        return next((f"[{name}]" for part in value if (name := _type(part))), "")
    return kind.__name__ if kind.__module__.startswith(("c2cserve.", "torch")) else ""


# ---- The server and its two requests ------------------------------------------------------------


@contextlib.contextmanager
def server(folder: Path) -> Generator[str]:
    """Start a server with one CPU slice and the hook; yield its address when all models are up."""
    (folder / "sitecustomize.py").write_text(
        f"import sys, threading\nsys.path.append({str(ROOT / 'scripts')!r})\n"
        "from pathlib import Path\nfrom trace_token import Hook\n"
        f"hook = Hook(Path({str(folder)!r}))\nthreading.setprofile(hook)\nsys.setprofile(hook)\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    paths = [str(folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [
            sys.executable, "-m", "c2cserve.cli.main", "serve", "--catalog", str(CATALOG),
            "--port", str(port), "--slices", "1", "--gpu-slices", "none", "--log-level", "error",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            with urllib.request.urlopen(f"{url}/admin/state") as response:
                state = json.load(response)
            ready = all(model["state"] == "ready" for model in state["models"])
            if ready and all(one["state"] == "up" for one in state["slices"]):
                return
        time.sleep(0.1)
    raise SystemExit("the server did not come up")


def ask(url: str, model: str, tokens: int) -> None:
    """Stream an answer of exactly so many tokens."""
    body = {
        "model": model, "prompt": "3 1 2", "max_tokens": tokens, "ignore_eos": True, "stream": True,
        "temperature": 0,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        assert b"[DONE]" in response.read()


def traced(url: str, folder: Path, model: str, tokens: int) -> Counter[Crossing]:
    """Return the crossings of one request, which finds its model active."""
    for path in folder.glob("*.jsonl"):
        os.truncate(path, 0)
    with (folder / "on").open("r+b") as file, mmap.mmap(file.fileno(), 1) as on:
        on[0] = 1
        ask(url, model, tokens)
        time.sleep(0.2)  # the end of the request reaches the policies after its last token
        on[0] = 0
    time.sleep(0.2)
    return crossings_in(folder)


def crossings_in(folder: Path) -> Counter[Crossing]:
    found: Counter[Crossing] = Counter()
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            where, caller, callee, kind, carried = json.loads(line)
            found[Crossing(where, caller, callee, kind, tuple(carried))] += 1
    return found


@dataclass(frozen=True, slots=True)
class Rate:
    crossing: Crossing
    per_token: float
    per_request: float


def rates(short: Counter[Crossing], long: Counter[Crossing]) -> list[Rate]:
    """Split the counts into those of a token and those of a request."""
    found: list[Rate] = []
    for crossing in sorted(short.keys() | long.keys()):
        per_token = (long[crossing] - short[crossing]) / (LONG - SHORT)
        found.append(Rate(crossing, per_token, short[crossing] - per_token * SHORT))
    return found


def show(found: list[Rate], *, everything: bool) -> None:
    where = ("", "")
    for rate in sorted(found, key=lambda rate: (rate.crossing.where, rate.crossing.border)):
        crossing = rate.crossing
        if not (everything or crossing.carries):
            continue
        if (crossing.where, crossing.border) != where:
            where = crossing.where, crossing.border
            print(f"\n{crossing.where}: {' -> '.join(crossing.border)}")
        print(
            f"  {rate.per_token:7.2f} a token {rate.per_request:7.2f} a request  {crossing.kind:6} "
            f"{crossing.caller} > {crossing.callee} ({', '.join(crossing.carried)})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sorter-llama")
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trace_token_") as name:
        folder = Path(name)
        (folder / "on").write_bytes(bytes([options.load]))
        with server(folder) as url:
            if options.load:
                time.sleep(1.0)  # the worker maps what is in the pool
                found = [Rate(crossing, 0.0, n) for crossing, n in crossings_in(folder).items()]
            else:
                ask(url, options.model, LONG)
                short = traced(url, folder, options.model, SHORT)
                found = rates(short, traced(url, folder, options.model, LONG))
    show(found, everything=options.all)
    if options.out:
        rows: list[dict[str, Any]] = [asdict(rate) for rate in found]
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
