"""`c2cserve demo`: serve the specialists, ask them hundreds of questions, check every answer."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from c2cserve.bench.specialists import Answer, ask_all, load_tasks, questions_of, running_server
from c2cserve.terminal.output import CliError
from c2cserve.terminal.output import console as plain_console


def demo(
    specialists: Annotated[
        Path, typer.Option(help="Folder with the models, their catalogue and their tasks.")
    ] = Path("examples/specialists"),
    requests: Annotated[int, typer.Option(min=2, help="How many to send.")] = 400,
    concurrency: Annotated[int, typer.Option(min=1, help="At a time, in the second half.")] = 8,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server up.")] = False,
) -> None:
    """Serve the specialists, ask them hundreds of questions, check every answer.

    Half of the requests go one by one, half several at a time; every request asks another
    model than the one before. Exits with 1 when any answer is wrong."""
    console = plain_console()
    catalog = specialists / "catalog.toml"
    if not catalog.is_file():
        raise CliError(
            f"{catalog}: no such file; run this in the repository, or pass --specialists"
        )
    questions = list(questions_of(load_tasks(specialists), requests))
    started = time.monotonic()
    with running_server(catalog) as (url, process):
        console.print(f"server up at {url} after {time.monotonic() - started:.1f} s")
        half = len(questions) // 2
        answers = asyncio.run(ask_all(url, questions[:half], 1))
        answers += asyncio.run(ask_all(url, questions[half:], concurrency))
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


def _ms(seconds: Sequence[float], share: float, digits: int) -> str:
    """Format a percentile in milliseconds; `-` if there are no values."""
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
    console.print(f"Dashboard: {url}/dashboard\n", soft_wrap=True, highlight=False)
    try:
        process.wait()
    except KeyboardInterrupt:
        os.kill(process.pid, signal.SIGTERM)
