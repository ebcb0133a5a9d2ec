"""The main job: a real server with a catalogue of models of published shapes, asked over HTTP.

python benchmarks/gpu_catalogue.py [--models 24] [--memory-gib N] [--scale N] [--kill] [--out FILE]

Random weights; every model is a segment of its own. Layers are divided by the smallest number that
makes the catalogue fit the memory this may use (`--scale` sets it). `--memory-gib` is what host
memory may become on machines that are given more as they use more; it is then used for a moment
before anything starts. With `--mount` (as root) pool and checkpoints get a tmpfs of their own:
where /dev/shm is small or disks are slow.

phases:
  interleaved  every model in turn, another one each time: short prompts, then long ones
  alone        the same requests, all of one model in a row: what the others are compared with
  switches     two tokens each, 500 times another model
  together     all requests again, 8 at a time
  kill         (with --kill) a worker is killed in the middle of an answer

An answer is right if its text is the same and its log-probabilities are within a tenth of a nat
(models of one shape are further apart: measured, too); how many are the same to the bit is counted.
Exits with 1 if one is wrong or a phase fails; what was measured before is kept.
"""

import argparse
import asyncio
import contextlib
import shlex
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from catalogue_files import MIX, Pick, pick, write_catalogue
from catalogue_phases import Phases
from catalogue_server import Server, ServerFailed, gpu_total_bytes
from gpu_models import SHAPES, weight_bytes
from host_memory import grow_memory, memory_bytes, tmpfs
from report import report

from c2cserve.engine.gpu.requirements import usable_gpus
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_profile
from c2cserve.kernels.gpu.gemm.choice.profile import ProfileError, load_profile

_POOL_SHARE, _RESERVE = 0.65, 4 << 30
"""Of host memory: the rest is for checkpoints, about a quarter of the pool, and for processes."""
_POOL_SLACK = 1 << 30
_OWN_BYTES = 200 << 20
"""Of a model's own file, about, at most."""


def main(arguments: list[str] | None = None) -> None:
    given = _arguments(arguments)
    began_s = time.monotonic()
    results: dict[str, Any] = {"failed": {}}

    def keep() -> None:
        results["seconds"] = time.monotonic() - began_s
        shown = {name: str(value) for name, value in vars(given).items() if value is not None}
        report(results, given.out, show=False, arguments=shown)

    with tempfile.TemporaryDirectory(prefix="c2cserve-catalogue-", dir=given.work) as work:
        try:
            _run(given, Path(work), began_s, results, keep)
        except (ServerFailed, ValueError, OSError, subprocess.SubprocessError) as error:
            results["failed"]["run"] = f"{type(error).__name__}: {error}"
            print(results["failed"]["run"], flush=True)
        except KeyboardInterrupt:
            results["failed"]["run"] = "interrupted"
    keep()
    if results["failed"]:
        raise SystemExit(f"failed: {', '.join(results['failed'])}")
    print(f"all answers are right, after {results['seconds']:.0f} s")


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mix = ",".join(f"{shape}:{weight}" for shape, weight in MIX)
    parser.add_argument("--models", type=int, default=24)
    parser.add_argument("--mix", default=mix, help="shape:weight,...")
    parser.add_argument("--scale", type=int, help="divides the number of layers")
    parser.add_argument("--memory-gib", type=float, help="of the host; default: what is free")
    parser.add_argument("--work", type=Path, help="for checkpoints; default: the temporary folder")
    parser.add_argument("--pool-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--mount", action="store_true", help="a tmpfs for pool and checkpoints")
    parser.add_argument("--serve", default="", help="more arguments of `c2cserve serve`, quoted")
    parser.add_argument("--short", type=int, default=12, help="tokens of short prompts")
    parser.add_argument("--long", type=int, default=512, help="of long ones")
    parser.add_argument("--tokens", type=int, default=16, help="of answers to short prompts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--switches", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--ready-s", type=float, default=240.0, help="for the server to come up")
    parser.add_argument("--budget-s", type=float, default=420.0, help="no request begins after it")
    parser.add_argument("--out", type=Path, help="JSON, written after every phase")
    given = parser.parse_args(arguments)
    try:
        given.mix = [(name, int(n)) for name, n in (one.split(":") for one in given.mix.split(","))]
    except ValueError:
        parser.error("--mix is shape:weight,shape:weight")
    if unknown := {name for name, _ in given.mix} - set(SHAPES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(SHAPES)}")
    return given


def _run(
    given: argparse.Namespace, work: Path, began_s: float, results: dict[str, Any],
    keep: Callable[[], None],
) -> None:  # fmt: skip
    memory = memory_bytes()["MemAvailable"]
    if given.memory_gib is not None:
        memory = int(given.memory_gib * (1 << 30))
    budget = max(_POOL_SLACK, int(memory * _POOL_SHARE) - _RESERVE)
    with _directories(given, work, memory) as (pool, files):
        budget = min(budget, shutil.disk_usage(pool).free - _POOL_SLACK)
        made = pick(given.models, budget, given.scale, given.mix)
        results["catalogue"] = _described(made)
        print(results["catalogue"]["said"], flush=True)
        needed = _check_room(pool, files, made)
        if given.memory_gib is not None:
            available = grow_memory(needed + _RESERVE)
            _tell(began_s, f"{available / 1e9:.0f} GB of memory are available")
        catalog = write_catalogue(files, made)
        _tell(began_s, "checkpoints written")
        arguments = ["--pool-dir", str(pool), "--pool-bytes", str(made.bytes + _POOL_SLACK // 8)]
        arguments += _by_profile(_on_gpus(shlex.split(given.serve)), results)
        with Server(catalog, work / "server.log", arguments) as server:
            try:
                server.wait_ready(given.ready_s, lambda said: _tell(began_s, said))
                results["ready_s"] = time.monotonic() - began_s
                _tell(began_s, "the server is up")
                phases = Phases(server, made, given, began_s + given.budget_s, results, keep)
                asyncio.run(phases.run())
            finally:
                if given.out is not None:
                    given.out.parent.mkdir(parents=True, exist_ok=True)
                    given.out.with_suffix(".log").write_text(server.last_words())


def _on_gpus(arguments: list[str]) -> list[str]:
    """A slice per GPU, where there are GPUs and the arguments do not say otherwise."""
    if "--gpu-slices" in arguments or not usable_gpus():
        return arguments
    return [*arguments, "--gpu-slices", "whole"]


def _by_profile(arguments: list[str], results: dict[str, Any]) -> list[str]:
    """`c2cserve serve`'s arguments: where this machine was not measured, picks are by the
    known rates of the nearest GPU, which the results say."""
    results["picked_by"] = "as asked for, or measured"
    if "--gpu-profile" in arguments:
        return arguments
    for name, size in sorted({(gpu.name, gpu.memory_bytes) for gpu in usable_gpus()}):
        try:
            load_profile(gpu=name)
        except ProfileError as error:
            note = assumed_profile(name, size).note
            print(f"{error}: picks are by {note}", flush=True)
            results["picked_by"] = note
            return [*arguments, "--gpu-profile", "assumed"]
    return arguments


def _check_room(pool: Path, files: Path, made: Pick) -> int:
    """Bytes of pool and checkpoints. Raises ValueError if they do not fit where they go."""
    shared = sum(weight_bytes(shape, layers) for shape, layers in made.shapes.items())
    needed = shared + len(made.entries) * _OWN_BYTES
    together = pool.stat().st_dev == files.stat().st_dev
    free = shutil.disk_usage(files).free - (made.bytes if together else 0)
    if free < needed:
        raise ValueError(
            f"checkpoints take {needed / 1e9:.1f} GB, {files} has {free / 1e9:.1f} to spare: name"
            " another folder (--work) or a larger --scale"
        )
    return needed + made.bytes


def _described(made: Pick) -> dict[str, Any]:
    counts = Counter(entry.shape for entry in made.entries)
    parts = [f"{n} x {shape} of {made.shapes[shape]} layers" for shape, n in counts.items()]
    hbm = gpu_total_bytes()
    larger = bool(hbm) and made.bytes > max(hbm)
    of_hbm = "no GPU"
    if hbm:
        of_hbm = f"{'MORE' if larger else 'less'} than a GPU's HBM ({max(hbm) / 1e9:.1f} GB)"
    said = (
        f"{len(made.entries)} models, 1/{made.scale} of their layers: {', '.join(parts)};"
        f" {made.bytes / 1e9:.1f} GB in the pool, {of_hbm}"
    )
    sizes = {shape: weight_bytes(shape, layers) for shape, layers in made.shapes.items()}
    return {
        "said": said, "models": len(made.entries), "scale": made.scale, "bytes": made.bytes,
        "counts": counts, "layers": made.shapes, "weight_bytes": sizes, "hbm_bytes": hbm,
        "larger_than_hbm": larger,
    }  # fmt: skip


@contextlib.contextmanager
def _directories(
    given: argparse.Namespace, work: Path, size: int
) -> Generator[tuple[Path, Path]]:  # fmt: skip
    """Where segments and checkpoints go: a tmpfs of their own if one is wanted and can be mounted.
    It says if it cannot."""
    if not given.mount:
        yield given.pool_dir, work
        return
    mounted = work / "memory"
    mounted.mkdir()
    with tmpfs(mounted, size) as refused:
        if refused:
            print(f"{refused}: the pool is in {given.pool_dir}", flush=True)
            yield given.pool_dir, work
        else:
            yield mounted, mounted


def _tell(began_s: float, said: str) -> None:
    print(f"{time.monotonic() - began_s:6.1f} s  {said}", flush=True)


if __name__ == "__main__":
    main()
