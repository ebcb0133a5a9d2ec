"""C2CServe's figures 13 and 14 on a live server: its parts left out, and ours, under one traffic.

python benchmarks/published_live.py [--figures 13,14] [--policies a,b]
    [--gpu-slices 40x3@0] [--peer-bytes N]
    [--short | --cpu] [--rate 3] [--seconds 60] [--rounds 3] [--out FILE]
    [further options of policies_live.py]

    figure 13    Aegaeon as it is, and with weights that stream through hybrid GEMMs
    figure 14    C2CServe; without placement, chunk sizing, control of alpha (0, 0.5, 1); ours

On one GPU weights stream from host memory. With --peer-bytes the other GPUs lend memory, where
weights are read then, as over NVLink-C2C. --short is meant to take less than 200 s for a figure.
With --cpu the same servers have CPU slices, which have no alpha: it tests this program.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import policies_live

from c2cserve.policy.by_name import hybrid_alpha

Row = dict[str, Any]

FIGURES = {
    13: ("aegaeon", "aegaeon-hybrid"),
    14: (
        "c2cserve-published", "c2cserve-no-placement", "c2cserve-no-chunks", "c2cserve-alpha-0",
        "c2cserve-alpha-0.5", "c2cserve-alpha-1", "c2cserve",
    ),
}  # fmt: skip
"""The first of a figure is what the others are compared with."""
PUBLISHED_S = {
    "aegaeon": 0.48, "aegaeon-hybrid": 0.15, "c2cserve-published": 0.64,
    "c2cserve-no-placement": 1.24, "c2cserve-no-chunks": 1.81, "c2cserve-alpha-0": 0.95,
    "c2cserve-alpha-0.5": 0.95, "c2cserve-alpha-1": 0.95,
}  # fmt: skip
"""Seconds to the first token in the paper: figure 13 does not say of which kind, 14 has the 99th
percentile. Which alpha its static one is, is not said."""
_GPU = (
    "--shape", "llama-3b", "--models", "6", "--prompt", "1500", "--output", "8",
    "--targets", "1,0.1",
)  # fmt: skip
_CPU = ("--slices", "2", "--targets", "2,0.5", "--prompt", "8-64", "--output", "8")


def main(arguments: Sequence[str] | None = None) -> None:
    given, further = _arguments(arguments)
    whole: Row = {}
    results: Row = {}
    with tempfile.TemporaryDirectory() as folder:
        for figure in given.figures:
            out = Path(folder) / f"{figure}.json"
            policies_live.main([*_load(given, figure), *further, "--out", str(out)])
            whole = json.loads(out.read_text())
            results[f"figure {figure}"] = rows_of(figure, whole["results"]["runs"])
            results[f"runs {figure}"] = whole["results"]["runs"]
            show(figure, results[f"figure {figure}"])
    if given.out is not None:
        text = json.dumps({**whole, "results": results}, indent=1)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n")


def _arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", default="13,14")
    parser.add_argument("--policies", help="of the figures, with their first; default: all")
    parser.add_argument("--gpu-slices", default="40x3@0", help="layout of GPU slices")
    parser.add_argument("--peer-bytes", type=int, default=0, help="that other GPUs lend")
    parser.add_argument("--short", action="store_true", help="6 s of each, four layers a model")
    parser.add_argument("--cpu", action="store_true", help="CPU slices, the demo's models")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", default="", help="further options of `serve`, one string")
    parser.add_argument("--out", type=Path, help="JSON")
    given, further = parser.parse_known_args(arguments)
    given.figures = [int(one) for one in given.figures.split(",")]
    if wrong := set(given.figures) - FIGURES.keys():
        parser.error(f"there is no figure {min(wrong)} here")
    named = given.policies.split(",") if given.policies else None
    given.shown = {
        figure: [one for one in FIGURES[figure] if named is None or one in named]
        for figure in given.figures
    }  # fmt: skip
    for figure, policies in given.shown.items():
        if not policies or policies[0] != FIGURES[figure][0]:
            parser.error(f"figure {figure} is compared with {FIGURES[figure][0]}")
    if given.short:
        given.seconds, given.rounds = 6.0, 1
        further += ["--warm", "6"]
    return given, further


def _load(given: argparse.Namespace, figure: int) -> list[str]:
    """Return the options of `policies_live` for a figure."""
    serve = given.serve
    if given.peer_bytes:
        serve += f" --gpu-peer-bytes {given.peer_bytes}"
    options = [
        "--policies", ",".join(given.shown[figure]), "--rates", str(given.rate), "--seconds",
        str(given.seconds), "--rounds", str(given.rounds), f"--serve={serve}",
    ]  # fmt: skip
    if given.cpu:
        return [*options, *_CPU]
    layers = ["--scale", "7"] if given.short else []
    return [*options, "--gpu-slices", given.gpu_slices, *_GPU, *layers]


def rows_of(figure: int, runs: Sequence[Row]) -> list[Row]:
    """Return a row for each policy: means over rounds, and ratios to the figure's first policy."""
    rows: list[Row] = []
    for policy in FIGURES[figure]:
        own = [run for run in runs if run["policy"] == policy]
        if not own:
            continue
        row: Row = {"policy": policy, "requests": sum(run["requests"] for run in own)}
        for name in ("in_time", "ttft_mean_ms", "ttft_p99_ms", "tpot_p50_ms"):
            row[name] = round(sum(run[name] for run in own) / len(own), 4)
        for name in ("weights_streamed", "weights_peer", "hybrid_hbm"):
            moved = sum(run.get(f"slice_{name}_bytes_total", 0.0) for run in own)
            row[f"{name}_gb_per_request"] = round(moved / 1e9 / max(1, row["requests"]), 3)
        row["alpha_changes"] = sum(run.get("slice_alpha_changes_total", 0.0) for run in own)
        row["hybrid_alpha"] = hybrid_alpha(policy)
        rows.append(row)
    key = "ttft_mean_ms" if figure == 13 else "ttft_p99_ms"
    first = rows[0]
    for row in rows:
        row["over_first"] = round(row[key] / first[key], 3) if first[key] else None
        here, there = PUBLISHED_S.get(row["policy"]), PUBLISHED_S[first["policy"]]
        row["published_over_first"] = None if here is None else round(here / there, 3)
    return rows


def show(figure: int, rows: Sequence[Row]) -> None:
    key = "ttft_mean_ms" if figure == 13 else "ttft_p99_ms"
    print(f"figure {figure}: first token ({'mean' if figure == 13 else 'p99'}), over the first row")
    for row in rows:
        print(
            f"  {row['policy']:22s} {row[key]:8.0f} ms  {row['over_first'] or 0:5.2f}x"
            f"  published {row['published_over_first'] or float('nan'):5.2f}x"
            f"  in time {row['in_time']:6.1%}"
            f"  {row['weights_streamed_gb_per_request']:.2f} GB over links a request,"
            f" {row['hybrid_hbm_gb_per_request']:.2f} of HBM, alpha set {row['alpha_changes']:.0f}x"
        )


if __name__ == "__main__":
    main()
