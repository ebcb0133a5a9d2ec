"""`scripts/soak`: arguments, folders, the run, its summary."""

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from catalogue_server import gpu_total_bytes
from host_memory import tmpfs

from c2cserve.engine.gpu.requirements import usable_gpus
from c2cserve.kernels.gpu.gemm.choice.profile import ProfileError, load_profile
from soak.catalogue import make_catalogue, needed_bytes
from soak.findings import Findings
from soak.phases import CPU, GPU, Phase, cpu_phases, gpu_phases
from soak.run import Plan, Run

_POOL_ROOM, _POOL_SPARE = 1.5, 64 << 20
"""A filesystem for the pool: times the catalogue's weights, and bytes more."""
_MINUTES = {"cpu": 2.0, "gpu": 8.0}


def main() -> None:
    given = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its server ends with it
    began_s = time.monotonic()

    def tell(said: str) -> None:
        print(f"{time.monotonic() - began_s:7.1f} s  {said}", flush=True)

    findings = Findings(given.out, given.seed, began_s, tell)
    summary: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(given).items()}}
    try:
        with _folders(given, tell) as (files, pool):
            _run(given, files, pool, findings, summary, began_s, tell)
    except (OSError, ValueError) as error:
        findings.violation("the run", "ends", "".join(traceback.format_exception(error)))
    except KeyboardInterrupt:
        findings.violation("the run", "ends", "interrupted")
    summary |= {**findings.summary(), "seconds": round(time.monotonic() - began_s, 1)}
    (given.out / "summary.json").write_text(json.dumps(summary, indent=1, default=str) + "\n")
    _report(given, findings, summary, tell)
    sys.exit(1 if findings.violations else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, help="all of it; default: 2, with --gpu 8")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpu", action="store_true", help="GPU slices and models of real shapes")
    parser.add_argument("--phases", help="names of those to run, separated by commas")
    parser.add_argument("--memory-share", type=float, default=1.0,
                        help="of the GPU: two runs at a time take 0.5 each")  # fmt: skip
    parser.add_argument("--work", type=Path, default=Path("/dev/shm"),
                        help="where a folder for checkpoints and pool is made")  # fmt: skip
    parser.add_argument("--mount", action="store_true", help="a tmpfs of its own there (root)")
    parser.add_argument("--out", type=Path, default=Path("soak_results"))
    given = parser.parse_args()
    kind = "gpu" if given.gpu else "cpu"
    given.minutes = _MINUTES[kind] if given.minutes is None else given.minutes
    return given


@contextlib.contextmanager
def _folders(
    given: argparse.Namespace, tell: Callable[[str], None]
) -> Generator[tuple[Path, Path]]:  # fmt: skip
    """For checkpoints and for the pool: names of this run's own, gone at its end."""
    name = f"soak-{given.seed}-"
    work = Path(tempfile.mkdtemp(prefix=name, dir=given.work))
    try:
        with contextlib.ExitStack() as stack:
            if given.mount:
                refused = stack.enter_context(tmpfs(work, 64 << 30))
                if refused:
                    tell(f"{refused}: checkpoints and pool are in {work}")
            files, pool = work / "files", work / "pool"
            files.mkdir()
            pool.mkdir()
            yield files, pool
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(
    given: argparse.Namespace, files: Path, pool: Path, findings: Findings,
    summary: dict[str, Any], began_s: float, tell: Callable[[str], None],
) -> None:  # fmt: skip
    setting = GPU if given.gpu else CPU
    phases: tuple[Phase, ...] = ()
    if given.gpu:  # what is lacking is said before gigabytes are written
        phases = gpu_phases(max(gpu_total_bytes(), default=0), given.memory_share)
    free, needed = shutil.disk_usage(files).free, needed_bytes(setting.shapes)
    if free < needed:
        raise ValueError(f"{files} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} are needed")
    catalogue = make_catalogue(files, setting.shapes)
    size = f"{catalogue.weight_bytes / 1e9:.2f} GB"
    tell(f"{len(catalogue.models)} models of {size}, seed {given.seed}")
    phases = phases or cpu_phases(catalogue)
    if given.phases:
        wanted = given.phases.split(",")
        if unknown := set(wanted) - {phase.name for phase in phases}:
            known = ", ".join(phase.name for phase in phases)
            raise ValueError(f"no phase {', '.join(sorted(unknown))}; there are {known}")
        phases = tuple(phase for phase in phases if phase.name in wanted)
    with tmpfs(pool, int(_POOL_ROOM * catalogue.weight_bytes) + _POOL_SPARE) as refused:
        if refused:
            tell(f"{refused}: the pool's filesystem is never filled")
        summary["filesystem filled"] = refused or True
        (pool / "segments").mkdir()
        (files / "bad").mkdir()
        plan = Plan(
            setting, phases, given.seed, given.gpu, began_s + 60 * given.minutes,
            given.gpu and given.memory_share >= 1.0, pool / "segments", None if refused else pool,
            files / "bad", given.out, _profile() if given.gpu else (),
        )  # fmt: skip
        run = Run(plan, catalogue, findings, tell)
        summary["phases"] = run.phases
        run.all_phases()


def _profile() -> tuple[str, ...]:
    """Where this machine was not measured, dataflows are picked by known rates."""
    for name in sorted({gpu.name for gpu in usable_gpus()}):
        try:
            load_profile(gpu=name)
        except ProfileError:
            return ("--gpu-profile", "assumed")
    return ()


def _report(
    given: argparse.Namespace, findings: Findings, summary: dict[str, Any],
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    tell(f"checks: {dict(findings.checks)}")
    tell(f"events: {dict(findings.events)}")
    answers = sum(findings.requests.values())
    if not findings.violations:
        tell(f"{answers} answers, no violation; {given.out / 'summary.json'}")
        return
    for name, count in findings.violations.most_common():
        tell(f"{count} x {name}")
    tell(f"{answers} answers, VIOLATIONS: {findings.file}; seed {summary['seed']}")


main()
