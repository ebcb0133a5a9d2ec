"""Published systems and ours in live servers: the share of requests in time under one traffic.

python benchmarks/policies_live.py [--policies c2cserve,slinfer,...] [--gpu-slices 64x2]
    [--slices 2] [--catalog examples/specialists/catalog.toml] [--rates 40,120] [--seconds 20]
    [--rounds 3] [--targets 1,0.1] [--prompt 8-64] [--output exp:48]
    [--shape llama-8b --models 6 --scale 1 --work DIR] [--serve "..."] [--out FILE]

In each round every policy gets a server of its own, in an order that changes from round to round.
All get the same requests: open loops with Poisson arrivals, whose seed is the round's number.
Models are asked by Zipf's law. A request is in time if its first token and its mean time per
further token are; a refused one is not. --targets replaces the catalogue's targets. On a machine
with GPUs, --gpu-slices gives the layout, as `serve` has it; without the option there are CPU
slices. With --shape, random models of it are served.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from catalogue_files import pick, write_catalogue
from catalogue_server import Server, exit_on_sigterm
from gpu_models import SHAPES
from report import report

from c2cserve.core.policy_names import PolicyName

ROOT = Path(__file__).parent.parent
_READY_S = 600.0
_POLICIES = "c2cserve,slinfer,serverlessllm,aegaeon,c2cserve-published,fcfs"
_COUNTERS = (
    "instances_started_total", "instances_ended_total", "consolidated_requests_total",
    "kv_resizes_total", "slice_turns_total", "slice_switches_total",
    "slice_weights_streamed_bytes_total", "slice_weights_peer_bytes_total",
    "slice_weight_fetched_bytes_total", "slice_hybrid_hbm_bytes_total", "slice_alpha_changes_total",
)  # fmt: skip

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    given = _arguments(arguments)
    exit_on_sigterm()
    runs: list[Row] = []
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        if given.shape:
            made = pick(given.models, 1 << 60, given.scale, ((given.shape, 1),))
            ttft_s, tpot_s = _targets(given.targets or "1,0.1")
            given.catalog = write_catalogue(Path(folder), made, ttft_s=ttft_s, tpot_s=tpot_s)
        elif given.targets:
            given.catalog = _with_targets(given.catalog, given.targets, Path(folder))
        defaults = tomllib.loads(given.catalog.read_text()).get("defaults", {})
        given.ttft_s, given.tpot_s = defaults.get("ttft_s", 1.0), defaults.get("tpot_s", 0.1)
        for number in range(given.rounds):
            turn = number % len(given.policies)
            for policy in given.policies[turn:] + given.policies[:turn]:
                runs += _measure(given, policy, number)
    results = {"runs": runs, "means": _means(runs)}
    _show(results["means"])
    catalog = (
        f"{given.models} x {given.shape} / {given.scale}"
        if given.shape
        else str(given.catalog.name)
    )
    report(
        results, given.out, show=False, slices=given.layout, catalog=catalog, prompt=given.prompt,
        output=given.output, seconds=given.seconds, rounds=given.rounds, serve=given.serve,
        ttft_s=given.ttft_s, tpot_s=given.tpot_s,
    )  # fmt: skip


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    catalog = ROOT / "examples" / "specialists" / "catalog.toml"
    parser.add_argument("--policies", default=_POLICIES)
    parser.add_argument("--gpu-slices", help="layout of GPU slices; default: CPU slices")
    parser.add_argument("--slices", type=int, default=2, help="CPU slices, without GPU slices")
    parser.add_argument("--catalog", type=Path, default=catalog)
    parser.add_argument("--shape", choices=SHAPES, help="of random models, without --catalog")
    parser.add_argument("--models", type=int, default=4, help="of the shape")
    parser.add_argument("--scale", type=int, default=1, help="with 1/SCALE of its layers")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm"), help="for models and pool")
    parser.add_argument("--rates", default="40,120", help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--warm", type=int, default=40, help="requests before the first load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--targets", help="TTFT,TPOT of all models, in seconds")
    parser.add_argument("--prompt", default="8-64", help="tokens")
    parser.add_argument("--output", default="exp:48", help="tokens")
    parser.add_argument("--serve", default="", help="further options of `serve`, one string")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    given.policies = given.policies.split(",")
    if wrong := set(given.policies) - set(get_args(PolicyName)):
        parser.error(f"a server has no policy {', '.join(sorted(wrong))}")
    given.rates = [float(rate) for rate in given.rates.split(",")]
    given.layout = f"--gpu-slices {given.gpu_slices}"
    if given.gpu_slices is None:
        given.layout = f"--gpu-slices none --slices {given.slices}"
    return given


def _targets(text: str) -> tuple[float, float]:
    ttft_s, tpot_s = (float(one) for one in text.split(","))
    return ttft_s, tpot_s


def _with_targets(catalog: Path, targets: str, folder: Path) -> Path:
    """Return a copy of the catalogue with these targets, and the same checkpoints."""
    ttft_s, tpot_s = _targets(targets)
    lines = [f"[defaults]\nttft_s = {ttft_s}\ntpot_s = {tpot_s}\n"]
    for model in tomllib.loads(catalog.read_text())["models"]:
        path = catalog.parent / model["path"]
        lines.append(f'[[models]]\nid = "{model["id"]}"\npath = "{path}"\n')
    copy = folder / catalog.name
    copy.write_text("\n".join(lines))
    return copy


def _measure(given: argparse.Namespace, policy: str, seed: int) -> list[Row]:
    """Return a row for each rate, of one server."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=given.work) as work:
        arguments = ["--pool-dir", work, "--policy", policy, *shlex.split(given.layout)]
        log = Path(work) / "log"
        with Server(given.catalog, log, [*arguments, *shlex.split(given.serve)]) as server:
            server.wait_ready(_READY_S)
            _offer(given, server, min(given.rates), 1000 + seed, given.warm)
            for rate in given.rates:
                before = server.metrics()
                found = _offer(given, server, rate, seed, max(1, round(rate * given.seconds)))
                after = server.metrics()
                counts = {
                    name: after[key] - before.get(key, 0.0)
                    for name in _COUNTERS if (key := f"c2cserve:{name}") in after
                }  # fmt: skip
                rows.append({"policy": policy, "seed": seed, "rate": rate, **found, **counts})
                print(f"{policy} {seed} {rate:g}/s: {found['in_time']:.1%}", flush=True)
    return rows


def _offer(given: argparse.Namespace, server: Server, rate: float, seed: int, requests: int) -> Row:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [
            sys.executable, "-m", "c2cserve.cli.main", "bench", "serve", "--url", server.url,
            "--mode", "poisson", "--rate", str(rate), "--requests", str(requests), "--seed",
            str(seed), "--popularity", "zipf:1.0", "--input-len", given.prompt, "--output-len",
            given.output, "--slo-ttft", str(given.ttft_s), "--slo-tpot", str(given.tpot_s),
            "--ignore-eos", "--out", out.name,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not (text := Path(out.name).read_text()):
            raise SystemExit(f"bench serve failed: {done.stdout}{done.stderr}")
    read = json.loads(text)
    total = read.get("results", read)["total"]
    return {
        "requests": total["requests"], "answered": total["ok"], "errors": total["errors"],
        "in_time": total["slo_attainment"], "ttft_p50_ms": _ms(total, "ttft_s", "p50"),
        "ttft_mean_ms": _ms(total, "ttft_s", "mean"),
        "ttft_p99_ms": _ms(total, "ttft_s", "p99"), "tpot_p50_ms": _ms(total, "tpot_s", "p50"),
    }  # fmt: skip


def _ms(total: Row, name: str, which: str) -> float:
    """Return a percentile of answered requests; 0 if there is none."""
    return 1e3 * total[name][which] if total[name] else 0.0


def _means(runs: list[Row]) -> list[Row]:
    rows: list[Row] = []
    for policy, rate in dict.fromkeys((one["policy"], one["rate"]) for one in runs):
        own = [one for one in runs if (one["policy"], one["rate"]) == (policy, rate)]
        shares = [one["in_time"] for one in own]
        rows.append(
            {
                "policy": policy, "rate": rate, "in_time": round(fmean(shares), 4),
                "least": min(shares), "most": max(shares),
                "ttft_p99_ms": round(fmean(one["ttft_p99_ms"] for one in own), 1),
                "tpot_p50_ms": round(fmean(one["tpot_p50_ms"] for one in own), 2),
            }
        )  # fmt: skip
    return rows


def _show(rows: list[Row]) -> None:
    for one in sorted(rows, key=lambda row: (row["rate"], -row["in_time"])):
        print(
            f"{one['rate']:6g}/s  {one['policy']:20s} {one['in_time']:6.1%}"
            f" ({one['least']:.1%} to {one['most']:.1%})  TTFT p99 {one['ttft_p99_ms']:.0f} ms,"
            f" TPOT {one['tpot_p50_ms']:.1f} ms"
        )


if __name__ == "__main__":
    main()
