"""`c2cserve demo`: serve the specialists, ask them hundreds of questions, check every answer."""

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from c2cserve.terminal.output import CliError
from c2cserve.terminal.output import console as plain_console

_READY_S = 60.0


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
    """From picking the request's model to its first kernel, as the worker measured it."""

    @property
    def right(self) -> bool:
        return self.text == self.question.answer


def demo(
    specialists: Annotated[
        Path, typer.Option(help="Folder with the models, their catalogue and their tasks.")
    ] = Path("examples/specialists"),
    requests: Annotated[int, typer.Option(help="How many to send.")] = 400,
    concurrency: Annotated[int, typer.Option(help="At a time, in the second half.")] = 8,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server up.")] = False,
) -> None:
    """Serve the specialists, ask them hundreds of questions, check every answer.

    Half of the requests go one by one, half `concurrency` at a time; every request asks another
    model than the one before. Exits with 1 when any answer is wrong."""
    console = plain_console()
    catalog = specialists / "catalog.toml"
    if not catalog.is_file():
        raise CliError(
            f"{catalog}: no such file; run this in the repository, or pass --specialists"
        )
    questions = list(_questions(_load_tasks(specialists), requests))
    started = time.monotonic()
    with _server(catalog) as (url, process):
        console.print(f"server up at {url} after {time.monotonic() - started:.1f} s")
        half = len(questions) // 2
        answers = asyncio.run(_ask_all(url, questions[:half], 1))
        answers += asyncio.run(_ask_all(url, questions[half:], concurrency))
        _report(console, answers, time.monotonic() - started)
        wrong = [answer for answer in answers if not answer.right]
        for answer in wrong[:10]:
            asked = answer.question
            console.print(
                f"wrong: {asked.model} {asked.text!r}: {answer.text!r}, not {asked.answer!r}"
            )
        if keep and not wrong:
            _keep(console, url, process)
    if wrong:
        raise CliError(f"{len(wrong)} of {len(answers)} answers are wrong")


def _load_tasks(specialists: Path) -> ModuleType:
    """The specialists' own question generators (they lie beside the models, not in the package)."""
    sys.path.insert(0, str(specialists))
    spec = importlib.util.spec_from_file_location("tasks", specialists / "tasks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tasks"] = module
    spec.loader.exec_module(module)
    return module


def _questions(tasks: ModuleType, count: int) -> Iterator[Question]:
    """Held-out prompts, the model changing from one to the next."""
    models: Sequence[str] = tasks.MODELS
    per_model = -(-count // len(models))
    prompts = {model: tasks.heldout(model, per_model, seed=2026) for model in models}
    for i in range(count):
        model = models[i % len(models)]
        prompt = prompts[model][i // len(models)]
        yield Question(model, prompt.kind, prompt.text, prompt.answer)


@contextmanager
def _server(catalog: Path) -> Generator[tuple[str, "subprocess.Popen[bytes]"]]:
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
        )  # fmt: skip
        try:
            if not asyncio.run(_ready(url, process)):
                log.flush()
                said = Path(log.name).read_text()[-2000:]
                raise CliError(f"the server did not come up:\n{said}")
            yield url, process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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


async def _ask_all(url: str, questions: Sequence[Question], concurrency: int) -> list[Answer]:
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


def _ms(seconds: Sequence[float], share: float, digits: int) -> str:
    """A percentile in milliseconds; `-` of nothing."""
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    return f"{ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3:.{digits}f}"


def _report(console: Console, answers: Sequence[Answer], took_s: float) -> None:
    table = Table(title=f"{len(answers)} requests, every one to another model than the last")
    for heading in ("model", "requests", "correct", "TTFT p50 ms", "p99", "TPOT p50 ms",
                    "switched", "switch p50 ms", "p99"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "model" else "right")
    models = sorted({answer.question.model for answer in answers})
    for name in [*models, "all"]:
        mine = [a for a in answers if name in (a.question.model, "all")]
        ttft = [a.ttft_s for a in mine]
        tpot = [a.tpot_s for a in mine if a.tpot_s is not None]
        switch = [a.switch_s for a in mine if a.switched]
        table.add_row(
            name, str(len(mine)), str(sum(a.right for a in mine)), _ms(ttft, 0.5, 1),
            _ms(ttft, 0.99, 1), _ms(tpot, 0.5, 2), str(len(switch)), _ms(switch, 0.5, 3),
            _ms(switch, 0.99, 3), end_section=name == models[-1],
        )  # fmt: skip
    console.print(table)
    console.print(f"done in {took_s:.1f} s")


def _keep(console: Console, url: str, process: "subprocess.Popen[bytes]") -> None:
    body = '{"model": "chat", "messages": [{"role": "user", "content": "What can you do?"}]}'
    console.print("\nThe server stays up until you press ctrl-C. Try:\n", style="bold")
    line = f"curl -s {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n"
    console.print(line, soft_wrap=True, highlight=False)
    try:
        process.wait()
    except KeyboardInterrupt:
        os.kill(process.pid, signal.SIGTERM)
