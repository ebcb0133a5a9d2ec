"""Decode steps of a live server, by batch and context: what each takes, by its counters.

python benchmarks/live_decodes.py [--shapes llama-8b,llama-3b] [--contexts 32,1024]
    [--batches 16,32,64] [--outputs 32,256] [--serve "--gpu-slices whole"] [--work DIR] [--out FILE]

`step_phases.py` times the engine's steps. A live server has a loop, messages and a client beside
them. For each batch, so many requests of one length are sent at once, twice; the second counts, as
its graphs are captured. Milliseconds of a token or a step:

  client     the median answer's mean time per token in its second half, as the client sees it
  compute    for how long a step without a prompt occupied the GPU, by the server's counters
  step       from step to step, while nothing but such steps ran: the loop's time beside prompts
  launch     the slice's thread for a batch and its launch; `completion` for its tokens
  wait       the thread's waits for a step whose tokens it needed
  others     all else of the thread: decisions, messages, tables

Where `client` is longer than `step`, tokens wait outside of the slice. Where `step` is longer than
`compute`, the GPU waits for the thread. Answers of 32 tokens are what `weights_mix.py` times.
"""

import argparse
import asyncio
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from catalogue_files import pick, write_catalogue
from catalogue_server import Server, exit_on_sigterm
from mix_times import late_tpot_s
from report import report

from c2cserve.bench.loadgen import Load, generate
from c2cserve.bench.loadgen_reply import Record
from c2cserve.bench.plan import Shape
from c2cserve.bench.prompts import Endpoint, Options, Prompts, Style

_READY_S, _TIMEOUT_S, _START_S = 180.0, 60.0, 0.2
_REST_S = 0.5
_COUNTER = "c2cserve:slice_"

Row = dict[str, Any]


def main() -> None:
    given = _arguments()
    exit_on_sigterm()
    rows: list[Row] = []
    for shape in given.shapes:
        with tempfile.TemporaryDirectory(dir=given.work) as folder:
            made = pick(1, 1 << 60, 1, ((shape, 1),))
            catalog = write_catalogue(Path(folder), made, ttft_s=10.0, tpot_s=1.0)
            arguments = ["--pool-dir", folder, *shlex.split(given.serve)]
            with Server(catalog, Path(folder) / "log", arguments) as server:
                server.wait_ready(_READY_S)
                live = _Live(server, made.entries[0].id)
                for output in given.outputs:
                    for context in given.contexts:
                        for batch in given.batches:
                            rows.append({"shape": shape, **live.row(batch, context, output)})
                            print(_line(rows[-1]), flush=True)
    report(
        {"decodes": rows}, given.out, show=False, serve=given.serve, shapes=given.shapes,
        contexts=given.contexts, batches=given.batches, outputs=given.outputs,
    )  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def numbers(text: str) -> list[int]:
        return [int(one) for one in text.split(",")]

    parser.add_argument("--shapes", type=lambda text: text.split(","), default="llama-8b,llama-3b")
    parser.add_argument("--contexts", type=numbers, default="32,1024", help="tokens of prompts")
    parser.add_argument("--batches", type=numbers, default="16,32,64")
    parser.add_argument("--outputs", type=numbers, default="32,256", help="tokens of answers")
    parser.add_argument("--serve", default="--gpu-slices whole", help="options of `serve`")
    parser.add_argument("--work", type=Path, metavar="DIR", default=Path("/dev/shm"))
    parser.add_argument("--out", type=Path, metavar="FILE")
    return parser.parse_args()


class _Live:
    """One model of a server."""

    def __init__(self, server: Server, model: str) -> None:
        self._server, self._model = server, model
        self._prompts = Prompts(0, Options(ignore_eos=True))

    def row(self, batch: int, context: int, output: int) -> Row:
        """Raises ValueError if a request is not answered."""
        asked = [Shape(self._model, context, output)] * batch
        self._send(asked)
        time.sleep(_REST_S)
        before = self._server.metrics()
        records = self._send(asked)
        time.sleep(_REST_S)  # the table of counters is written now and then
        after = self._server.metrics()
        risen = {
            name.removeprefix(_COUNTER): value - before.get(name, 0.0)
            for name, value in after.items()
            if name.startswith(_COUNTER) and name.endswith("_total")
        }
        client_s = median(late_tpot_s(one) for one in records)
        sizes = {"batch": batch, "context": context, "output": output}
        return {**sizes, "client_s": client_s, **_steps(risen), "counters": risen}

    def _send(self, asked: Sequence[Shape]) -> list[Record]:
        load = Load(
            self._server.url, Endpoint.COMPLETIONS.path,
            self._prompts.plan(asked, {self._model: Style(ids=True)}),
            concurrency=len(asked), timeout_s=_TIMEOUT_S, start_s=time.monotonic() + _START_S,
        )  # fmt: skip
        records = asyncio.run(generate(load, lambda _: None)).records
        if failed := [record for record in records if not record.ok]:
            raise ValueError(f"{self._model}: {failed[0].error}: {failed[0].error_detail}")
        return records


def _steps(risen: Mapping[str, float]) -> Row:
    """Return the seconds of a step without a prompt."""

    def seconds(name: str) -> float:
        return risen.get(f"{name}_seconds_total", 0.0)

    steps = risen["steps_total"]
    decodes = steps - risen["prefill_steps_total"] - risen["switched_steps_total"]
    if decodes < 1:
        raise ValueError("no step was without a prompt: ask for longer answers")
    thread_s = sum(seconds(name) for name in ("policy", "submit", "action", "poll"))
    counted_s = seconds("step_wait") + sum(
        seconds(f"{kind}_{part}")
        for kind in ("prefill", "decode", "switched")
        for part in ("batch", "launch", "completion")
    )
    launch_s = seconds("decode_batch") + seconds("decode_launch")
    prompts_s = seconds("prefill_compute") + seconds("switched_compute")
    return {
        "steps": decodes, "prefill_steps": risen["prefill_steps_total"],
        "compute_s": seconds("decode_compute") / decodes,
        "step_s": (seconds("in_flight") - prompts_s) / decodes,
        "launch_s": launch_s / decodes, "completion_s": seconds("decode_completion") / decodes,
        "wait_s": seconds("step_wait") / steps, "others_s": (thread_s - counted_s) / steps,
    }  # fmt: skip


def _line(row: Row) -> str:
    shown = ("client", "compute", "step", "launch", "completion", "wait", "others")
    times = "  ".join(f"{name} {row[f'{name}_s'] * 1e3:.2f}" for name in shown)
    return (
        f"{row['shape']}  {row['batch']} x {row['context']}+{row['output']}:"
        f" {row['steps']:.0f} steps, {row['prefill_steps']:.0f} with prompts; ms: {times}"
    )


if __name__ == "__main__":
    main()
