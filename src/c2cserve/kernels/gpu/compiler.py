"""Ahead-of-time build of the device code: one cubin per variant, in a folder keyed by its sources.

Nothing here needs a GPU. A cubin's key covers all that decides its bytes: the source and every file
it includes, the flags and the compiler's version. Files appear under their final name whole or not
at all, so builds may race and be killed.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from c2cserve.kernels.gpu.variants import Source, Variant

SOURCES = Path(__file__).parent / "cuda"
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


class BuildError(Exception):
    """A variant could not be built, or is not fit to run; says which, why and what to do."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the assembler said of a kernel. All but registers must be 0 (`check`)."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def fit(self) -> bool:
        """No local memory: a streaming kernel that spills is slow in ways that are hard to see."""
        used = self.stack_bytes + self.spill_store_bytes + self.spill_load_bytes
        return used == 0 and not self.warnings


def default_folder() -> Path:
    """Where cubins are kept: $C2CSERVE_HOME/kernels, else the user's cache."""
    home = os.environ.get("C2CSERVE_HOME")
    base = Path(home) if home else Path.home() / ".cache" / "c2cserve"
    return base / "kernels"


def included_files(source: Path) -> list[Path]:
    """The source and all files of ours it includes, directly or not, each once."""
    found: dict[Path, None] = {}
    stack = [source]
    while stack:
        path = stack.pop()
        if path in found:
            continue
        found[path] = None
        stack += [path.parent / name for name in _INCLUDE.findall(path.read_text())]
    return list(found)


@cache
def _sources_digest(source: Source) -> str:
    digest = hashlib.sha256()
    for path in sorted(included_files(SOURCES / f"{source}.cu")):
        digest.update(f"{path.name}\0{path.read_text()}\0".encode())
    return digest.hexdigest()


def key(variant: Variant) -> str:
    """What the variant's cubin is filed under: changes with anything that changes its bytes.

    The compiler's version is not part of it but of the report beside the cubin: machines that only
    run kernels have no compiler to ask.
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
    """CUDA's compiler: on PATH, under CUDA_HOME, or of the `nvidia-cuda-nvcc` wheel."""
    home = os.environ.get("CUDA_HOME")
    wheels = sorted(Path(__file__).parents[3].glob("nvidia/*/bin/nvcc"))
    places = [shutil.which("nvcc"), *([f"{home}/bin/nvcc"] if home else []), *map(str, wheels)]
    for place in [*places, "/usr/local/cuda/bin/nvcc"]:
        if place and Path(place).exists():
            return place
    raise BuildError(
        "no CUDA compiler (nvcc 13): install the CUDA toolkit, or `pip install nvidia-cuda-nvcc`,"
        " or set CUDA_HOME, and run `c2cserve kernels build` again"
    )


@cache
def nvcc_version(nvcc: str) -> str:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def compile_variant(variant: Variant, folder: Path, nvcc: str) -> Report:
    """Build one cubin into `folder`. Raises `BuildError` with the compiler's own words."""
    folder.mkdir(parents=True, exist_ok=True)
    defines = [f"-D{name}={value}" for name, value in variant.defines.items()]
    source = SOURCES / f"{variant.source}.cu"
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as work:
        output = Path(work) / "out.cubin"
        done = subprocess.run(
            [nvcc, *_FLAGS, *defines, str(source), "-o", str(output)],
            capture_output=True, text=True, check=False, timeout=_TIMEOUT_S,
        )  # fmt: skip
        if done.returncode != 0:
            raise BuildError(f"nvcc failed on {variant.name}:\n{done.stdout}{done.stderr}")
        report = parse_report(done.stderr)
        text = json.dumps({"compiler": nvcc_version(nvcc), **asdict(report)})
        _install(text.encode(), report_path(folder, variant))
        _install(output.read_bytes(), cubin_path(folder, variant))
    return report


def parse_report(text: str) -> Report:
    """Read `ptxas -v`'s words on one kernel. Raises `BuildError` if they are not there."""
    frame = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text
    )
    registers = re.search(r"Used (\d+) registers", text)
    if frame is None or registers is None:
        raise BuildError(f"the assembler did not report on the kernel:\n{text}")
    stack, stores, loads = (int(number) for number in frame.groups())
    warnings = tuple(line.strip() for line in text.splitlines() if "warning" in line.lower())
    return Report(int(registers[1]), stack, stores, loads, warnings)


def _install(data: bytes, path: Path) -> None:
    """Whole under its final name, or not there."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".build-", delete=False) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).rename(path)


def read_report(folder: Path, variant: Variant) -> Report | None:
    """The report of a built variant; None if it is not built."""
    if not cubin_path(folder, variant).exists():
        return None
    fields = json.loads(report_path(folder, variant).read_text())
    del fields["compiler"]
    return Report(**{**fields, "warnings": tuple(fields["warnings"])})


def build(
    variants: Iterable[Variant],
    folder: Path,
    *,
    force: bool = False,
    built: Callable[[Variant, Report], None] | None = None,
) -> list[Variant]:
    """Compile what `folder` lacks (all, with `force`), as many at a time as there are cores.

    Returns what was compiled; `built` hears of each as it is done. Raises `BuildError` for the
    first that fails; those that were done stay.
    """
    lacking = [v for v in variants if force or not cubin_path(folder, v).exists()]
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
        except BuildError:
            executor.shutdown(cancel_futures=True)
            raise
    return lacking


def check(variants: Iterable[Variant], folder: Path) -> list[str]:
    """What is wrong with a folder of cubins: variants that are missing or use local memory."""
    problems: list[str] = []
    for variant in variants:
        report = read_report(folder, variant)
        if report is None:
            problems.append(f"{variant.name} is not built: run `c2cserve kernels build`")
        elif not report.fit:
            problems.append(f"{variant.name} uses local memory: {report}")
    return problems


def clean(variants: Iterable[Variant], folder: Path) -> int:
    """Remove cubins that no variant's present sources would give. Returns how many files went."""
    keep = {path for v in variants for path in (cubin_path(folder, v), report_path(folder, v))}
    stale = [p for p in folder.glob("*") if p.suffix in {".cubin", ".json"} and p not in keep]
    for path in stale:
        path.unlink(missing_ok=True)
    return len(stale)
