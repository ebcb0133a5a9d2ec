"""RotaSched on a live server: one model, memory for KV cut so that it binds. JSON.

python benchmarks/rotation_live.py [--orders rotation,none,first-come] [--rates 4,5,6,8]
    [--shape S] [--kv-gb 2] [--seconds 14] [--with FILE] [--out FILE]
python benchmarks/rotation_live.py --cpu --shape tiny-llama --kv-gb 0.004 --rates 20 --seconds 1
    --prompt 512 --output 64

rotation     KV of requests leaves and comes back by virtual lag (SuperInfer's Algorithm 1)
none         the same targets, no rotation: a request that loses its KV computes it again
first-come   no rotation and no deadlines: the order of arrival

Requests have ShareGPT's lengths, capped, and come at random times. Every order gets the same ones.
Orders run at the same time, each on a GPU of its own, as far as there are GPUs. A TTFT of 5 s and a
TBT of 100 ms count, as a client sees them; a request is in time for TBT if its mean time per token
is. `--with` is an earlier result, whose orders are compared with these.

The bar is at the rate at which half of first-come's requests have their first token in time: there
rotation has 1.5 times as many, and no fewer in time for TBT. It is interpolated between rates.
"""

import argparse
import asyncio
import json
import random
import shlex
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from catalogue_files import pick, write_catalogue
from catalogue_server import Server, ServerFailed, one_slice, serving
from gpu_models import SHAPES, config_of, weight_bytes
from report import report

from c2cserve.bench.loadgen import Load, Planned, generate
from c2cserve.bench.loadgen_reply import Record
from c2cserve.bench.plan import Caps, Shape, poisson
from c2cserve.bench.prompts import Endpoint, Options, Prompts, Style
from c2cserve.sim.workload.catalogue import find_lengths

ORDERS = ("rotation", "none", "first-come")
TTFT_S, TBT_S = 5.0, 0.1
NO_DEADLINE_S = 3600.0
_TTFT_BAR, _TBT_BAR = 1.5, 0.98
"""Rotation over first-come: first tokens in time, and requests in time for TBT. The second one is
"not lower", but for the noise of a run."""
HOST_KV_BYTES = 24 << 30
_CPU_HOST_KV_BYTES = 64 << 20
_READY_S, _IDLE_S = 90.0, 30.0
_WARM = 4
Rows = list[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> None:
    given = _arguments(arguments)
    began_s = time.monotonic()
    earlier = json.loads(given.earlier.read_text())["results"] if given.earlier else {"rows": []}
    rows: Rows = [row for row in earlier["rows"] if row["order"] not in given.orders]
    with tempfile.TemporaryDirectory(dir=given.work or Path("/dev/shm")) as work:
        made = pick(1, 1 << 60, 1, ((given.shape, 1),))
        catalog = write_catalogue(Path(work) / "catalogue", made, TTFT_S, TBT_S)
        runs = [_Order(name, Path(work), catalog, made, given) for name in given.orders]
        gpus = 1 if given.cpu else _gpus()
        for first in range(0, len(runs), gpus):
            _together(runs[first : first + gpus])
    failed = {run.name: run.failed for run in runs if run.failed}
    rows += [row for run in runs for row in run.rows]
    results: dict[str, Any] = {
        "rows": rows, "failed": failed, "bars": bars(rows), "answers": equal_answers(rows),
        "wall_s": time.monotonic() - began_s,
    }  # fmt: skip
    for row in rows:
        row.pop("texts", None)
    for bar in results["bars"]:
        print(bar, flush=True)
    report(
        results, given.out, shape=given.shape, kv_gb=given.kv_gb, seconds=given.seconds,
        seed=given.seed, ttft_s=TTFT_S, tbt_s=TBT_S, prompt=given.prompt, output=given.output,
        answer_s=given.answer_s, serve=given.serve,
    )  # fmt: skip
    if failed or results["answers"]["different"]:
        raise SystemExit(f"failed: {failed or 'answers differ'}")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--orders", default=",".join(ORDERS), help=", ".join(ORDERS))
    parser.add_argument("--rates", default="4,5,6,8", help="requests a second")
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--kv-gb", type=float, default=2.0, help="beside the weights")
    parser.add_argument("--seconds", type=float, default=14.0, help="of arrivals, for each rate")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens, at most")
    parser.add_argument("--output", type=int, default=512, help="tokens, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--answer-s", type=float,
        help="how long a request is waited for; default: as long as the longest in time may take",
    )  # fmt: skip
    parser.add_argument("--cpu", action="store_true", help="CPU slices, to try it without a GPU")
    parser.add_argument("--serve", default="", help="more arguments of `c2cserve serve`")
    parser.add_argument("--with", dest="earlier", type=Path, help="an earlier result")
    parser.add_argument("--work", type=Path, help="for checkpoints and pools; /dev/shm")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    if given.answer_s is None:
        given.answer_s = TTFT_S + TBT_S * given.output
    given.orders = given.orders.split(",")
    given.rates = sorted(float(rate) for rate in given.rates.split(","))
    if unknown := set(given.orders) - set(ORDERS):
        parser.error(f"unknown orders: {', '.join(sorted(unknown))}")
    return given


def _gpus() -> int:
    import torch

    return max(1, torch.cuda.device_count())


class _Order:
    """All rates with one order, on a server of its own."""

    def __init__(
        self, name: str, work: Path, catalog: Path, made: Any, given: argparse.Namespace
    ) -> None:
        self.name, self.rows, self.failed = name, list[dict[str, Any]](), ""
        self._work, self._made, self._given = work / name, made, given
        self._work.mkdir()
        self._catalog = self._work / "catalog.toml"
        text = catalog.read_text()
        if name == "first-come":
            for kind, value in (("ttft", TTFT_S), ("tpot", TBT_S)):
                text = text.replace(f"{kind}_s = {value}", f"{kind}_s = {NO_DEADLINE_S}")
        self._catalog.write_text(text)

    def run(self, gpu: int) -> None:
        """Run, and note what fails."""
        try:
            self._run(gpu)
        except (ServerFailed, OSError, ValueError) as error:
            self.failed = f"{type(error).__name__}: {error}"

    def _run(self, gpu: int) -> None:
        given, model = self._given, self._made.entries[0].id
        arguments = ["--patience", "0", *self._slice_of(gpu), *shlex.split(given.serve)]
        with serving(
            self._catalog, self._made.bytes, self._work, arguments, tell=self._tell,
            ready_s=_READY_S,
        ) as server:  # fmt: skip
            self._tell("is up")
            for rate in (0.0, *given.rates):  # the first ones do not count
                asked = _requests(given, model, rate)
                before = server.metrics()
                begun_s = time.monotonic()
                load = Load(
                    server.url, Endpoint.COMPLETIONS.path, asked, timeout_s=given.answer_s,
                    start_s=begun_s + 0.2, keep_text=True,
                )  # fmt: skip
                records = asyncio.run(generate(load, lambda _: None)).records
                risen = {k: v - before.get(k, 0.0) for k, v in server.metrics().items()}
                _rest(server)
                if rate:
                    self.rows.append({"order": self.name, "rate": rate} | figures(records, risen))
                    self._tell(_line(self.rows[-1]))

    def _slice_of(self, gpu: int) -> list[str]:
        given, room = self._given, round(self._given.kv_gb * 1e9)
        host_bytes = HOST_KV_BYTES if self.name == "rotation" else 0
        if given.cpu:
            host_bytes = min(host_bytes, _CPU_HOST_KV_BYTES)
        arena_bytes = weight_bytes(given.shape) + room
        own = one_slice(arena_bytes, gpu=None if given.cpu else gpu, cpu_kv_bytes=room)
        return [*own, "--host-kv-bytes", str(host_bytes)]

    def _tell(self, line: str) -> None:
        print(f"{self.name}: {line}", flush=True)


def _together(runs: Sequence[_Order]) -> None:
    threads = [threading.Thread(target=run.run, args=(gpu,)) for gpu, run in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _requests(given: argparse.Namespace, model: str, rate: float) -> list[Planned]:
    """A rate's requests, the same for all orders. Rate 0: some that warm up."""
    shapes = shapes_of(given, model, rate)
    planned = Prompts(given.seed, Options(ignore_eos=True)).plan(shapes, {model: Style(ids=True)})
    vocab = config_of(given.shape).vocab
    for one in planned:
        body = json.loads(one.body)
        body["prompt"] = [token % vocab for token in body["prompt"]]
        one.body = json.dumps(body).encode()
    return planned


def shapes_of(given: argparse.Namespace, model: str, rate: float) -> list[Shape]:
    """Return a rate's requests without their prompts."""
    rng = random.Random(f"{given.seed} {rate}")
    lengths, caps = find_lengths("sharegpt"), Caps(given.prompt, given.output)
    return poisson(
        [model], [1.0], rate or 10.0, None if rate else _WARM, given.seconds if rate else None,
        lambda rng: caps.apply(*lengths(rng)), rng,
    )  # fmt: skip


def _rest(server: Server) -> None:
    until_s = time.monotonic() + _IDLE_S
    while time.monotonic() < until_s:
        state = server.state()
        if not state["running"] + state["waiting"]:
            return
        time.sleep(0.1)
    raise ServerFailed(f"requests go on {_IDLE_S:.0f} s after their clients left")


# ---- figures ------------------------------------------------------------------------------------


def figures(records: Sequence[Record], risen: dict[str, float]) -> dict[str, Any]:
    """Shares in time of all requests; those without an answer are not in time."""
    first = [one.first_s >= 0 and one.ttft_s <= TTFT_S for one in records]
    moved = {name: risen.get(f"c2cserve:slice_{name}_bytes_total", 0.0)
             for name in ("kv_out", "kv_in", "prefix_out")}  # fmt: skip
    steady = [one.ok and (one.tpot_s or 0.0) <= TBT_S for one in records]
    started = [one for one in records if one.first_s >= 0 and one.gaps_s]
    gaps = [gap for one in started for gap in one.gaps_s]
    return {
        "requests": len(records), "answered": sum(one.ok for one in records),
        "ttft_in_time": _share(first), "tbt_in_time": _share(steady),
        "both_in_time": _share([a and b for a, b in zip(first, steady, strict=True)]),
        "gaps_in_time": _share([gap <= TBT_S for gap in gaps]),
        "errors": sorted({one.error for one in records if one.error}),
        # Blocks of prompts go out once, as cached prefixes, and come in with the rest.
        "rotated": {"out": moved["kv_out"] + moved["prefix_out"], "in": moved["kv_in"]},
        "texts": {str(one.index): one.text for one in records if one.ok},
    }  # fmt: skip


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['rate']:g}/s: {row['requests']} requests, first tokens in time"
        f" {row['ttft_in_time']:.1%}, TBT {row['tbt_in_time']:.1%},"
        f" {row['answered']} answered, errors {row['errors']}, KV {row['rotated']}"
    )


def equal_answers(rows: Rows) -> dict[str, int]:
    """Compare the texts of requests that several orders have answered."""
    compared = different = 0
    for i, one in enumerate(rows):
        for other in rows[i + 1 :]:
            if one["rate"] == other["rate"] and "texts" in one and "texts" in other:
                common = one["texts"].keys() & other["texts"].keys()
                compared += len(common)
                different += sum(one["texts"][k] != other["texts"][k] for k in common)
    return {"compared": compared, "different": different}


def bars(rows: Rows) -> Rows:
    """Compare rotation with the other orders at the rate where half of first-come's first tokens
    are in time. No rows if that rate is beyond those that were run."""
    by_order: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["rate"]):
        by_order.setdefault(row["order"], []).append(row)
    if "rotation" not in by_order or "first-come" not in by_order:
        return []
    rate = _rate_of_half(by_order["first-come"])
    if rate is None:
        return []
    found: Rows = []
    for key, bar in (("ttft_in_time", _TTFT_BAR), ("tbt_in_time", _TBT_BAR)):
        at = {order: _at(of_order, key, rate) for order, of_order in by_order.items()}
        ratio = at["rotation"] / max(1e-9, at["first-come"])
        found.append({"bar": f"{key}, rotation to first-come", "rate": rate, "shares": at,
                      "value": ratio, "limit": bar, "met": ratio >= bar})  # fmt: skip
    return found


def _rate_of_half(rows: Rows) -> float | None:
    for low, high in pairwise(rows):
        a, b = low["ttft_in_time"], high["ttft_in_time"]
        if a >= 0.5 >= b:
            return low["rate"] + (high["rate"] - low["rate"]) * (a - 0.5) / max(1e-9, a - b)
    return None


def _at(rows: Rows, key: str, rate: float) -> float:
    for low, high in pairwise(rows):
        if low["rate"] <= rate <= high["rate"]:
            share = (rate - low["rate"]) / (high["rate"] - low["rate"])
            return low[key] + share * (high[key] - low[key])
    return rows[0][key] if rate < rows[0]["rate"] else rows[-1][key]


if __name__ == "__main__":
    main()
