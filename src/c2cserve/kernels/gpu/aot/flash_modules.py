"""FlashInfer's attention, built ahead into the folder of our own kernels.

    <folder>/flashinfer-<version>/<module>/<module>.so

FlashInfer compiles a module for each dtype, head size and kind of mask when it first needs one. A
server must not compile. So `build` has FlashInfer compile the usual modules, in a process and a
workspace of their own. The results lie as FlashInfer expects modules that were shipped with it.
Only `build` needs FlashInfer, and nothing here needs torch or a GPU.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from c2cserve.core.tensors import HalfDtype
from c2cserve.kernels.gpu.aot.compiler import BuildError, State, find_nvcc, nvcc_version

_PACKAGE = "flashinfer-python"
_FOLDER = "flashinfer-"
_ARCH = "9.0a"
_OUTPUT_MAX = 8000
"""How much of a failed compiler's output is shown, from its end. Its first lines are commands."""
_TIMEOUT_S = 3600.0
"""The limit for one module. It has ten files of CUTLASS templates, and each takes minutes."""


@dataclass(frozen=True, slots=True)
class FlashKind:
    """What a module of FlashInfer is compiled for."""

    dtype: HalfDtype
    head_dim: int
    windowed: bool = False

    @property
    def name(self) -> str:
        return f"flashinfer_{self.dtype}_{self.head_dim}" + "_window" * self.windowed


MODULES = (
    FlashKind("bfloat16", 128), FlashKind("float16", 128), FlashKind("bfloat16", 64),
)  # fmt: skip
"""The modules that are built ahead, the most common kind first. Each takes two cores some ten
minutes. FlashInfer's own packages of modules have other kinds. Without those packages, our kernel
computes them."""


def installed() -> str | None:
    """Return FlashInfer's version; None if it is not installed."""
    try:
        return version(_PACKAGE)
    except PackageNotFoundError:
        return None


def modules_folder(folder: Path, flashinfer: str) -> Path:
    """Return where the modules of this version of FlashInfer lie in a folder of kernels."""
    return folder / f"{_FOLDER}{flashinfer}"


def _record(folder: Path, kind: FlashKind, flashinfer: str) -> Path:
    """Return the path of the file that names the kind's module. It is written last."""
    return modules_folder(folder, flashinfer) / f"{kind.name}.json"


def built(folder: Path, kind: FlashKind, flashinfer: str) -> bool:
    record = _record(folder, kind, flashinfer)
    try:
        fields: dict[str, Any] = json.loads(record.read_text())
        module = str(fields["module"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # changed by another program: `build` makes it again
    return (record.parent / module / f"{module}.so").is_file()


def state(folder: Path, kind: FlashKind, flashinfer: str) -> State:
    """Return whether the module is built. It is stale if another version of FlashInfer built it."""
    if built(folder, kind, flashinfer):
        return "built"
    return "stale" if any(folder.glob(f"{_FOLDER}*/{kind.name}.json")) else "missing"


def check(folder: Path, flashinfer: str) -> list[str]:
    """Return a line for each module that is not built."""
    states = {kind: state(folder, kind, flashinfer) for kind in MODULES}
    said = {
        "missing": "is not built",
        "stale": f"was built by another FlashInfer than {flashinfer}",
    }
    return [f"{kind.name} {said[found]}" for kind, found in states.items() if found != "built"]


def clean(folder: Path, flashinfer: str | None) -> int:
    """Remove the modules of other versions; all of them, if FlashInfer is not installed.

    Return the number of modules removed.
    """
    keep = None if flashinfer is None else modules_folder(folder, flashinfer)
    old = [path for path in folder.glob(f"{_FOLDER}*") if path != keep]
    removed = sum(len(list(path.glob("*.json"))) for path in old)
    for path in old:
        shutil.rmtree(path, ignore_errors=True)
    return removed


def build(
    folder: Path,
    flashinfer: str,
    *,
    kinds: Iterable[FlashKind] = MODULES,
    force: bool = False,
    done: Callable[[FlashKind], None] | None = None,
) -> list[FlashKind]:
    """Compile what `folder` lacks (all, with `force`), one module after another, as each keeps all
    cores busy.

    Return what was compiled. `done` is called after each one. Raises `BuildError` for the first
    that fails.
    """
    lacking = [kind for kind in kinds if force or not built(folder, kind, flashinfer)]
    if not lacking:
        return []
    nvcc = find_nvcc()
    for kind in lacking:
        _compile(folder, kind, flashinfer, nvcc)
        if done is not None:
            done(kind)
    return lacking


def _compile(folder: Path, kind: FlashKind, flashinfer: str, nvcc: str) -> None:
    target = modules_folder(folder, flashinfer)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as work:
        # FlashInfer reads these variables when it is imported, hence a process of its own.
        environment = os.environ | {
            "CUDA_HOME": str(_toolkit(nvcc, Path(work) / "cuda")),
            "FLASHINFER_NVCC": nvcc,
            "FLASHINFER_CUDA_ARCH_LIST": _ARCH,
            "FLASHINFER_EXTRA_CUDAFLAGS": " ".join(f"-isystem {path}" for path in _headers()),
            "FLASHINFER_WORKSPACE_BASE": work,
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",  # ninja's place
        }
        environment.pop("FLASHINFER_DISABLE_JIT", None)
        made = Path(work) / "made"
        command = [sys.executable, "-m", "c2cserve.kernels.gpu.aot.flash_compile"]
        command += [kind.dtype, str(kind.head_dim), str(int(kind.windowed)), str(made)]
        _run(command, kind.name, environment)
        (module,) = made.iterdir()
        record = Path(work) / "json"
        record.write_text(json.dumps({"module": module.name, "compiler": nvcc_version(nvcc)}))
        shutil.rmtree(target / module.name, ignore_errors=True)
        module.replace(target / module.name)
        record.replace(_record(folder, kind, flashinfer))


def _toolkit(nvcc: str, home: Path) -> Path:
    """Make a CUDA_HOME of links at `home`, for an nvcc of a toolkit or of a wheel. Return `home`.

    FlashInfer links with CUDA's runtime and driver. Wheels have the runtime under another name, and
    no driver. An empty library takes the driver's place: its symbols are resolved on the machine
    that has a GPU.
    """
    asked = _run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], "nvcc", dict(os.environ))
    tops = [line.partition("TOP=")[2].strip() for line in asked.splitlines() if "TOP=" in line]
    top = Path(tops[0] if tops else Path(nvcc).parent.parent).resolve()
    runtimes = [
        path for lib in ("lib64", "lib") for path in sorted(top.glob(f"{lib}/libcudart.so*"))
    ]
    if not runtimes:
        raise BuildError(f"FlashInfer links with CUDA's runtime: no libcudart.so under {top}")
    (home / "lib64").mkdir(parents=True)
    (home / "lib64/libcudart.so").symlink_to(runtimes[0])
    for part in ("bin", "include", "nvvm"):
        if (top / part).exists():
            (home / part).symlink_to(top / part)
    compiler = os.environ.get("CXX", "c++")
    driver = [compiler, "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c++", os.devnull]
    _run([*driver, "-o", str(home / "lib64/libcuda.so")], compiler, dict(os.environ))
    return home


def _headers() -> list[Path]:
    """Return the include folders of wheels. torch's wheels have headers (cuRAND's) that small
    toolkits lack."""
    spec = importlib.util.find_spec("nvidia")
    places = (spec and spec.submodule_search_locations) or ()
    return [path for place in places for path in sorted(Path(place).glob("*/include"))]


def _run(command: list[str], what: str, environment: dict[str, str]) -> str:
    """Run a command and return its output. Raises `BuildError`."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False,
            timeout=_TIMEOUT_S,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise BuildError(f"{command[0]} is not there, and FlashInfer's modules need it") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{what} took over {_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        output = f"{done.stdout}{done.stderr}"[-_OUTPUT_MAX:]
        raise BuildError(f"{what} failed\n{output}")
    return done.stdout + done.stderr
