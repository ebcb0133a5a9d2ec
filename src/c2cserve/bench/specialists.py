"""A server of the specialists, and questions whose answers can be checked: for `c2cserve demo`."""

import asyncio
import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import aiohttp

from c2cserve.processes.parent_death import end_with_parent
from c2cserve.terminal.output import CliError

_READY_S = 60.0
_TO_CALLER = "c2cserve: "
"""Begins the lines that commands write for their callers."""


@dataclass(frozen=True, slots=True)
class Question:
    model: str
    kind: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Answer:
    question: Question
    text: str
    ttft_s: float
    tpot_s: float | None
    """None when the answer is a single chunk."""
    switched: bool
    switch_s: float
    """Time from picking the request's model to its first kernel, measured by the worker."""

    @property
    def right(self) -> bool:
        return self.text == self.question.answer


def load_tasks(specialists: Path) -> ModuleType:
    """Import the specialists' own question generators, which lie beside the models."""
    sys.path.insert(0, str(specialists))
    spec = importlib.util.spec_from_file_location("tasks", specialists / "tasks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tasks"] = module
    spec.loader.exec_module(module)
    return module


def questions_of(tasks: ModuleType, count: int) -> Iterator[Question]:
    """Yield held-out prompts. The model changes from one to the next."""
    models: Sequence[str] = tasks.MODELS
    per_model = -(-count // len(models))
    prompts = {model: tasks.heldout(model, per_model, seed=2026) for model in models}
    for i in range(count):
        model = models[i % len(models)]
        prompt = prompts[model][i // len(models)]
        yield Question(model, prompt.kind, prompt.text, prompt.answer)


@contextlib.contextmanager
def running_server(catalog: Path) -> Generator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Start a server on a free port and end it afterwards. The value is its URL and its process.

    The server ends with this process, however this one ends. Raises CliError with the server's
    reason if it is not ready in time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile("wb", prefix="c2cserve-demo-", suffix=".log") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "c2cserve.cli.main", "serve",
                "--catalog", str(catalog), "--port", str(port), "--log-format", "json",
                "--gpu-slices", "none",  # nothing was built or measured for one
            ],
            stdout=log, stderr=log, process_group=0,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),  # noqa: PLW1509 - there are no threads yet
        )  # fmt: skip
        try:
            if not asyncio.run(_ready(url, process)):
                reason = reason_of(Path(log.name).read_text(errors="replace"))
                raise CliError(f"the server did not come up: {reason}")
            yield url, process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def reason_of(log: str) -> str:
    """Return why a server ended: the last line of its log that is for its caller, or an error.

    A log without either is one of a server that was too slow."""
    reason = f"it was not ready within {_READY_S:g} s"
    for line in log.splitlines():
        if line.startswith(_TO_CALLER):
            reason = line.removeprefix(_TO_CALLER)
        elif '"level":"error"' in line:
            with contextlib.suppress(ValueError):  # the last line may be torn
                reason = str(json.loads(line)["message"])
    return reason


async def _ready(url: str, process: "subprocess.Popen[bytes]") -> bool:
    """Wait until every slice is up and every model is in the pool."""
    deadline = time.monotonic() + _READY_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                async with session.get(f"{url}/admin/state") as response:
                    state = await response.json()
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)
                continue
            models_ready = all(model["state"] == "ready" for model in state["models"])
            if models_ready and all(s["state"] == "up" for s in state["slices"]):
                return True
            await asyncio.sleep(0.05)
    return False


async def ask_all(url: str, questions: Sequence[Question], concurrency: int) -> list[Answer]:
    """Ask all questions, at most `concurrency` at a time. Raises CliError if one is refused."""
    limit = asyncio.Semaphore(concurrency)
    async with aiohttp.ClientSession(url) as session:

        async def one(question: Question) -> Answer:
            async with limit:
                return await _ask(session, question)

        return await asyncio.gather(*map(one, questions))


async def _ask(session: aiohttp.ClientSession, question: Question) -> Answer:
    body: dict[str, object] = {
        "model": question.model, "temperature": 0, "max_tokens": 64, "stream": True,
    }  # fmt: skip
    if question.kind == "chat":
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": question.text}]
    else:
        path = "/v1/completions"
        body["prompt"] = question.text
    started = time.perf_counter()
    arrivals: list[float] = []
    parts: list[str] = []
    async with session.post(path, json=body) as response:
        if response.status != 200:
            raise CliError(f"{question.model}: {response.status} {await response.text()}")
        headers = response.headers
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            if text:
                arrivals.append(time.perf_counter())
                parts.append(text)
    gaps = len(arrivals) - 1
    return Answer(
        question,
        "".join(parts),
        ttft_s=(arrivals[0] if arrivals else time.perf_counter()) - started,
        tpot_s=(arrivals[-1] - arrivals[0]) / gaps if gaps > 0 else None,
        switched=headers["x-c2cserve-switched"] == "true",
        switch_s=float(headers["x-c2cserve-switch-ms"]) / 1e3,
    )
