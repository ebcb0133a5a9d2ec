"""Ahead-of-time build of the device code: one cubin per variant, in a folder keyed by its sources.

Nothing here needs torch or a GPU. A cubin's key covers its source, every file of ours that it
includes, the defines and the flags: what was built from anything else is never found. Files appear
under their final name whole or not at all, so builds may race and be killed.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from c2cserve.kernels.gpu.aot.variants import Source, Variant

SOURCES = Path(__file__).parents[1] / "cuda"
ARCH = "sm_90a"
_FLAGS = (
    "-std=c++17",
    "-O3",
    "--cubin",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xptxas=-v,-warn-spills,-warn-lmem-usage",
    "--diag-error=549",  # used before set
)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_TIMEOUT_S = 300.0
_TOOLKIT = Path("/usr/local/cuda")
_UNFINISHED = ".build-*"
"""Folders of builds at work, or killed."""

State = Literal["built", "stale", "missing"]
"""stale: what lies there was built from other sources or flags; it is not loaded."""


class BuildError(Exception):
    """A variant could not be built: a line that says which and why, then the compiler's words."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the assembler said of a kernel. Registers are of a thread."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def fit(self) -> bool:
        """No local memory: a streaming kernel that spills is slow in ways that are hard to see."""
        return not self.faults

    @property
    def faults(self) -> str:
        """What makes it unfit, in words; empty for nothing."""
        sizes = {
            "stack": self.stack_bytes,
            "spilled": self.spill_store_bytes,
            "read back": self.spill_load_bytes,
        }
        said = [f"{size} bytes {what}" for what, size in sizes.items() if size]
        return ", ".join([*said, *self.warnings])


def default_folder() -> Path:
    """Where cubins are kept: $C2CSERVE_HOME/kernels, else the user's cache."""
    home = os.environ.get("C2CSERVE_HOME")
    base = Path(home) if home else Path.home() / ".cache" / "c2cserve"
    return base / "kernels"


def _with_includes(source: Path) -> dict[Path, str]:
    """The texts of a source and of all files of ours it includes, directly or not. Raises
    `BuildError` for one that is not there."""
    texts: dict[Path, str] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path in texts:
            continue
        try:
            texts[path] = path.read_text()
        except FileNotFoundError as error:
            raise BuildError(f"{source.name} needs {path}, which is not there") from error
        waiting += [path.parent / name for name in _INCLUDE.findall(texts[path])]
    return texts


def _sources_digest(source: Source) -> str:
    digest = hashlib.sha256()
    for path, text in sorted(_with_includes(SOURCES / f"{source}.cu").items()):
        digest.update(f"{path.name}\0{text}\0".encode())
    return digest.hexdigest()


def key(variant: Variant) -> str:
    """What the variant's cubin is filed under.

    The compiler's version is not part of it but of the report beside the cubin: machines that only
    run kernels have no compiler to ask. After an upgrade, `build` with `force`.
    """
    text = json.dumps(
        [variant.name, sorted(variant.defines.items()), _FLAGS, _sources_digest(variant.source)]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cubin_path(folder: Path, variant: Variant) -> Path:
    return folder / f"{variant.name}.{key(variant)}.cubin"


def report_path(folder: Path, variant: Variant) -> Path:
    return cubin_path(folder, variant).with_suffix(".json")


def find_nvcc() -> str:
    """CUDA's compiler: under CUDA_HOME, on PATH, of the `nvidia-cuda-nvcc` wheel, or where the
    toolkit is usually installed. Raises `BuildError`."""
    home = os.environ.get("CUDA_HOME")
    named = [f"{home}/bin/nvcc"] if home else []
    for place in (*named, shutil.which("nvcc"), *_wheel_nvcc(), f"{_TOOLKIT}/bin/nvcc"):
        if place and Path(place).is_file():
            return place
    raise BuildError(
        "no CUDA compiler (nvcc 13): `pip install '.[gpu]'` in the checkout, or install the CUDA"
        " toolkit, or set CUDA_HOME, and run `c2cserve kernels build` again"
    )


def _wheel_nvcc() -> list[str]:
    """Wheels of CUDA 13 share the folder nvidia/cu13, wherever packages are installed."""
    spec = importlib.util.find_spec("nvidia")
    places = (spec and spec.submodule_search_locations) or ()
    return [str(path) for place in places for path in sorted(Path(place).glob("*/bin/nvcc"))]


@cache
def nvcc_version(nvcc: str) -> str:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def compile_variant(variant: Variant, folder: Path, nvcc: str) -> Report:
    """Build one cubin into `folder`. Raises `BuildError` with the compiler's own words."""
    folder.mkdir(parents=True, exist_ok=True)
    defines = [f"-D{name}={value}" for name, value in variant.defines.items()]
    source = SOURCES / f"{variant.source}.cu"
    cubin, report_file = cubin_path(folder, variant), report_path(folder, variant)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_UNFINISHED[:-1]) as work:
        output, words = Path(work) / "cubin", Path(work) / "json"
        try:
            done = subprocess.run(
                [nvcc, *_FLAGS, *defines, str(source), "-o", str(output)],
                capture_output=True, text=True, check=False, timeout=_TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"nvcc took over {_TIMEOUT_S:.0f} s on {variant.name}") from error
        if done.returncode != 0:
            raise BuildError(f"nvcc failed on {variant.name}\n{done.stdout}{done.stderr}")
        report = parse_report(done.stderr)
        words.write_text(json.dumps({"compiler": nvcc_version(nvcc), **asdict(report)}))
        # The cubin last: where there is one, there is its report.
        _install(words, report_file)
        _install(output, cubin)
    return report


def parse_report(text: str) -> Report:
    """Read `ptxas -v`'s words on one kernel and on functions it calls. Raises `BuildError` if they
    are not there."""
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text
    )
    registers = re.findall(r"Used (\d+) registers", text)
    if not frames or len(registers) != 1:
        raise BuildError(f"the assembler did not report on one kernel\n{text}")
    stack, stores, loads = (sum(map(int, column)) for column in zip(*frames, strict=True))
    warnings = tuple(line.strip() for line in text.splitlines() if "warning" in line.lower())
    return Report(int(registers[0]), stack, stores, loads, warnings)


def _install(file: Path, path: Path) -> None:
    """Whole under its final name, or not there. Others may read it: it has the umask's mode."""
    with file.open("rb") as written:
        os.fsync(written.fileno())
    file.replace(path)


def read_report(folder: Path, variant: Variant) -> Report | None:
    """The report of a built variant; None if it is not built, or nothing tells how."""
    if not cubin_path(folder, variant).exists():
        return None
    try:
        fields: dict[str, Any] = json.loads(report_path(folder, variant).read_text())
        del fields["compiler"]
        fields["warnings"] = tuple(fields["warnings"])
        return Report(**fields)
    except (OSError, ValueError, KeyError, TypeError):
        # Changed by another program: the same as no cubin, so `build` makes both again.
        return None


def state(folder: Path, variant: Variant) -> State:
    """Whether `folder` has the variant's cubin, one of other sources, or neither."""
    if read_report(folder, variant) is not None:
        return "built"
    return "stale" if any(folder.glob(f"{variant.name}.*.cubin")) else "missing"


def build(
    variants: Iterable[Variant],
    folder: Path,
    *,
    force: bool = False,
    built: Callable[[Variant, Report], None] | None = None,
) -> list[Variant]:
    """Compile what `folder` lacks (all, with `force`), as many at a time as there are cores.

    Returns what was compiled; `built` hears of each as it is done, in this thread. Raises
    `BuildError` for the first that fails; those that were done stay.
    """
    lacking = [v for v in variants if force or read_report(folder, v) is None]
    if not lacking:
        return []
    nvcc = find_nvcc()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as executor:
        jobs = {executor.submit(compile_variant, v, folder, nvcc): v for v in lacking}
        try:
            for job in as_completed(jobs):
                report = job.result()
                if built is not None:
                    built(jobs[job], report)
        except BaseException:
            # An interrupt does not wait for what has not begun.
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    return lacking


def check(variants: Iterable[Variant], folder: Path) -> list[str]:
    """What is wrong with a folder of cubins: variants that are missing, stale or use local memory.
    A line each."""
    problems: list[str] = []
    for variant in variants:
        report = read_report(folder, variant)
        if report is None and state(folder, variant) == "stale":
            problems.append(f"{variant.name} is stale: its sources have changed since")
        elif report is None:
            problems.append(f"{variant.name} is not built")
        elif not report.fit:
            problems.append(f"{variant.name} uses local memory: {report.faults}")
    return problems


def clean(variants: Iterable[Variant], folder: Path) -> int:
    """Remove cubins that no variant's present sources would give, and what killed builds left.
    Returns how many files (and folders of killed builds) went."""
    keep = {path for v in variants for path in (cubin_path(folder, v), report_path(folder, v))}
    stale = [p for p in folder.glob("*") if p.suffix in {".cubin", ".json"} and p not in keep]
    for path in stale:
        path.unlink(missing_ok=True)
    dead = [p for p in folder.glob(_UNFINISHED) if _age_s(p) > 2 * _TIMEOUT_S]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    return len(stale) + len(dead)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
