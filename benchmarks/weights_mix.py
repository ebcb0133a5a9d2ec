"""A catalogue larger than a GPU's memory: a live server beside the simulation of the same requests.

python benchmarks/weights_mix.py [--cells all:2,70:4,30+90:2] [--seeds 1,2] [--requests 150]
    [--simulate-only | --live-only] [--tiny] [--work DIR] [--out FILE]
python benchmarks/weights_mix.py --again FILE [--counted] [--out FILE]
python benchmarks/weights_mix.py --plot FILE [FILE ...] [--images FOLDER]

Five 3B and three 8B models (Llama shapes, full depth, random weights; 80 GB in the pool, 23 GB of
checkpoints). Requests arrive at random (Poisson), models are asked by Zipf's law, prompts are
lognormal (median 512), answers have 64 tokens on average. A request is in time if its first token
comes within 1 s after it was due, and its mean time per further token is within 100 ms.

A cell is the slice's arena (GB; `all`: what the server takes; `30+90`: 90 GB more, lent by a second
GPU) and a rate (requests a second). Its requests are those of all seeds together. A request that
has no whole answer after --answer-s is unanswered, which is missed. With --work the checkpoints are
kept in DIR for the next run; the pool is in --pool-dir.

Step times for the simulator are measured on the first server (weights in memory, one model at a
time), or are those of an earlier result (--times). Else they are worked out from the speeds in this
machine's profile, or from those known of its GPU. --tiny has tiny models, and a CPU for a GPU.
--again simulates the cells of an earlier result anew, on any machine, beside what was live. With
--counted the host's thread takes for a step what the server counted in the same cell. That says
whether the thread explains a difference; it is no forecast.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mix_load import FULL, TINY, parse_cells
from mix_machine import IMAGINED, Refused
from mix_run import Run, line_of, steps_line, weights_line

from c2cserve.devices.gpus import GpuProblem


def main(arguments: Sequence[str] | None = None) -> None:
    given = _arguments(arguments)
    if given.plot:
        from weights_mix_plots import plot_mix

        print(plot_mix([json.loads(path.read_text()) for path in given.plot], given.images))
        return
    with tempfile.TemporaryDirectory(prefix="c2cserve-mix-", dir=given.pool_dir) as scratch:
        run = Run(given, Path(scratch))
        try:
            run.again(json.loads(given.again.read_text())) if given.again else run.all()
        except (Refused, GpuProblem) as error:
            raise SystemExit(f"weights_mix: {error}") from error
        except (ValueError, OSError) as error:
            run.results["failed"]["run"] = f"{type(error).__name__}: {error}"
        except KeyboardInterrupt:
            run.results["failed"]["run"] = "interrupted"
        run.keep()
    _show(run.results)
    if failed := run.results["failed"]:
        raise SystemExit("\n".join(f"{what}: {why}" for what, why in failed.items()))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cells", help="ARENA:RATE,...; default: 11 cells, those that the machine can do"
    )
    parser.add_argument("--seeds", default="1,2", help="of requests; their answers are pooled")
    parser.add_argument("--requests", type=int, default=150, help="of a cell, all seeds together")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--simulate-only", action="store_true", help="no server, no checkpoints")
    only.add_argument("--live-only", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU slice")
    parser.add_argument(
        "--gpu", choices=IMAGINED, help="simulate this GPU instead of the machine's"
    )
    parser.add_argument(
        "--profile", type=Path, help="speeds to simulate by; default: this machine's"
    )
    parser.add_argument(
        "--times", type=Path, metavar="FILE", help="step times of an earlier result"
    )
    parser.add_argument(
        "--again", type=Path, metavar="FILE", help="an earlier result to simulate anew"
    )
    parser.add_argument(
        "--counted", action="store_true", help="the host's thread as counted in each cell"
    )
    parser.add_argument(
        "--host-kv-bytes", type=int, help="for paused requests; default: 4 GB, tiny: 64 MB"
    )
    parser.add_argument(
        "--answer-s", type=float, default=60.0, help="how long a request is waited for"
    )
    parser.add_argument("--ready-s", type=float, default=240.0, help="for a server to come up")
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="no live cell begins that would end after it"
    )
    parser.add_argument(
        "--memory-gib", type=float, help="what host memory may become where it grows with use"
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep checkpoints here for the next run"
    )
    parser.add_argument("--pool-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument(
        "--serve", default="", help="more arguments of `c2cserve serve`, one string"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON, written after every cell; logs of servers beside it"
    )
    parser.add_argument(
        "--plot", type=Path, nargs="+", metavar="FILE", help="draw earlier results, no GPU"
    )
    parser.add_argument("--images", type=Path, default=Path("docs/images"), help="of --plot")
    given = parser.parse_args(arguments)
    if given.counted and not given.again:
        parser.error("--counted is for --again")
    if given.gpu and not given.simulate_only:
        parser.error("--gpu is for --simulate-only")
    try:
        given.seeds = [int(seed) for seed in given.seeds.split(",")]
        given.all_cells = given.cells is None
        given.tiny = given.tiny or bool(given.again and _was_tiny(given.again))
        given.mix = TINY if given.tiny else FULL
        given.cells = parse_cells(given.cells or given.mix.cells)
    except ValueError as error:
        parser.error(str(error))
    if given.requests < len(given.seeds):
        parser.error(f"{given.requests} requests are too few for {len(given.seeds)} seeds")
    if given.host_kv_bytes is None:
        given.host_kv_bytes = 64 << 20 if given.tiny else 4 * 10**9
    return given


def _was_tiny(path: Path) -> bool:
    """Raises ValueError."""
    try:
        return bool(json.loads(path.read_text())["parameters"]["tiny"])
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no earlier result: {error}") from error


def _show(results: dict[str, Any]) -> None:
    for row in results["rows"]:
        for world in ("live", "simulated"):
            if world in row:
                print(f"{row['cell']:>10}  {world:<9}  {line_of(row[world])}")
        if "live" in row:
            print(f"{'':>10}  {'weights':<9}  {weights_line(row['live']['counters'])}")
            print(f"{'':>10}  {'steps':<9}  {steps_line(row['live']['counters'])}")
    for text, why in results["refused"].items():
        print(f"{text:>10}  refused: {why}")
    if results["not_run"]:
        print(f"not run, for lack of time: {', '.join(results['not_run'])}")


if __name__ == "__main__":
    main()
