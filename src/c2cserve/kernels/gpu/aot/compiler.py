"""Ahead-of-time build of the device code: one cubin per variant, named by a hash of its sources.

Nothing here needs torch or a GPU. A cubin's key covers its source, every file of ours that it
includes, the defines and the flags. So a cubin that was built from anything else is never found.
Files appear under their final names complete or not at all. So builds may race, and be killed.
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
from typing import Any, Literal, TypeVar

from c2cserve.kernels.gpu.aot.variants import BuiltKernel

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
"""Folders of builds that are under way or were killed."""

KernelT = TypeVar("KernelT", bound=BuiltKernel)
State = Literal["built", "stale", "missing"]
"""stale: the cubin there was built from other sources or flags, and is not loaded."""


class BuildError(Exception):
    """A variant could not be built. The message says why, and ends with the compiler's output."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the assembler reports on a kernel. Registers are those of one thread."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def fit(self) -> bool:
        """Whether it uses no local memory. A streaming kernel that spills is slow, and benchmarks
        hardly show why."""
        return not self.faults

    @property
    def faults(self) -> str:
        """Why it is unfit, for messages; empty if it is fit."""
        sizes = {
            "stack": self.stack_bytes,
            "spilled": self.spill_store_bytes,
            "read back": self.spill_load_bytes,
        }
        said = [f"{size} bytes {what}" for what, size in sizes.items() if size]
        return ", ".join([*said, *self.warnings])


def default_folder() -> Path:
    """Return the folder of cubins: $C2CSERVE_HOME/kernels, else one in the user's cache."""
    home = os.environ.get("C2CSERVE_HOME")
    base = Path(home) if home else Path.home() / ".cache" / "c2cserve"
    return base / "kernels"


def _with_includes(source: Path) -> dict[Path, str]:
    """Return the texts of a source and of all files of ours that it includes, directly or not.

    Raises `BuildError` for a missing file.
    """
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


def _sources_digest(source: str) -> str:
    digest = hashlib.sha256()
    for path, text in sorted(_with_includes(SOURCES / f"{source}.cu").items()):
        digest.update(f"{path.name}\0{text}\0".encode())
    return digest.hexdigest()


def key(variant: BuiltKernel) -> str:
    """Return the key in the name of the variant's cubin.

    The compiler's version is in the report beside the cubin, not in the key: machines that only run
    kernels have no compiler. After an upgrade of the compiler, `build` with `force`.
    """
    text = json.dumps(
        [variant.name, sorted(variant.defines.items()), _FLAGS, _sources_digest(variant.source)]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cubin_path(folder: Path, variant: BuiltKernel) -> Path:
    return folder / f"{variant.name}.{key(variant)}.cubin"


def report_path(folder: Path, variant: BuiltKernel) -> Path:
    return cubin_path(folder, variant).with_suffix(".json")


def find_nvcc() -> str:
    """Return the path of CUDA's compiler. Raises `BuildError` if there is none.

    It is sought under CUDA_HOME, on PATH, in the `nvidia-cuda-nvcc` wheel, and where the toolkit is
    usually installed.
    """
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
    """Return the compilers of installed wheels. Those of CUDA 13 share the folder nvidia/cu13."""
    spec = importlib.util.find_spec("nvidia")
    places = (spec and spec.submodule_search_locations) or ()
    return [str(path) for place in places for path in sorted(Path(place).glob("*/bin/nvcc"))]


@cache
def nvcc_version(nvcc: str) -> str:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def compile_variant(variant: BuiltKernel, folder: Path, nvcc: str) -> Report:
    """Build one cubin into `folder`. Raises `BuildError` with the compiler's output."""
    folder.mkdir(parents=True, exist_ok=True)
    defines = [f"-D{name}={value}" for name, value in variant.defines.items()]
    source = SOURCES / f"{variant.source}.cu"
    cubin, report_file = cubin_path(folder, variant), report_path(folder, variant)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_UNFINISHED[:-1]) as work:
        output, written_report = Path(work) / "cubin", Path(work) / "json"
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
        written_report.write_text(json.dumps({"compiler": nvcc_version(nvcc), **asdict(report)}))
        # The cubin comes last, so that every cubin has its report.
        _install(written_report, report_file)
        _install(output, cubin)
    return report


def parse_report(text: str) -> Report:
    """Read what `ptxas -v` printed on one kernel and the functions it calls. Raises `BuildError` if
    it printed nothing on them."""
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
    """Give a file its final name. It is complete there, or absent. Its mode is the umask's."""
    with file.open("rb") as written:
        os.fsync(written.fileno())
    file.replace(path)


def read_report(folder: Path, variant: BuiltKernel) -> Report | None:
    """Return the report of a built variant; None if it is not built, or its report is damaged."""
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


def state(folder: Path, variant: BuiltKernel) -> State:
    """Return whether `folder` has the variant's cubin, one of other sources, or neither."""
    if read_report(folder, variant) is not None:
        return "built"
    return "stale" if any(folder.glob(f"{variant.name}.*.cubin")) else "missing"


def build(
    variants: Iterable[KernelT],
    folder: Path,
    *,
    force: bool = False,
    built: Callable[[KernelT, Report], None] | None = None,
) -> list[KernelT]:
    """Compile what `folder` lacks (all, with `force`), as many at a time as there are cores.

    Return what was compiled. `built` is called in this thread after each one. Raises `BuildError`
    for the first that fails; those that were done stay.
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
            # An interrupt does not wait for compilations that have not begun.
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    return lacking


def check(variants: Iterable[BuiltKernel], folder: Path) -> list[str]:
    """Return a line for each variant that is missing, stale or uses local memory."""
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


def clean(variants: Iterable[BuiltKernel], folder: Path) -> int:
    """Remove cubins that no variant's present sources produce, and what killed builds left.

    Return the number of files and folders that were removed.
    """
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
