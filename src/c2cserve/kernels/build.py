"""Build the native code, with g++ or clang++.

That is the CPU kernels, one shared library per instruction set, the transfer engine, and the
library that other programs preload.

Used by `setup.py`; `python -m c2cserve.kernels.build` rebuilds in place, `... --sanitize FOLDER`
builds with the address and undefined-behaviour sanitizers, elsewhere. Standard library only.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = tuple(HERE / "cpu" / name for name in ("api.cpp", "threads.cpp"))
TRANSFER = "_transfer.so"
TRANSFER_SOURCES = tuple(
    HERE.parent / "transfer" / "native" / name
    for name in (
        "api.cpp",
        "cuda.cpp",
        "cuda_links.cpp",
        "engine.cpp",
        "relay_client.cpp",
        "relay_kernel.cpp",
        "relay_server.cpp",
        "schedule.cpp",
    )
)
MULTIPATH = "libc2cserve_multipath.so"
_PRELOAD = HERE.parent / "transfer" / "preload"
MULTIPATH_SOURCES = (
    *(
        _PRELOAD / name
        for name in (
            "driver.cpp",
            "hooks.cpp",
            "lane.cpp",
            "memory.cpp",
            "paths.cpp",
            "real.cpp",
            "report.cpp",
            "spread.cpp",
        )
    ),
    HERE.parent / "transfer" / "native" / "cuda.cpp",
)
_MULTIPATH_FLAGS = (
    f"-Wl,--version-script={_PRELOAD / 'exports.map'}",
    "-Wl,-Bsymbolic",
    # The program may have a newer C++ library, which an old one that is loaded first would hide.
    "-static-libstdc++",
    "-static-libgcc",
    "-Wl,--gc-sections",
    "-ldl",
)

_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mpclmul")
_AVX512 = (
    *_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512",
)  # fmt: skip
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")
_X86: dict[str, tuple[str, ...]] = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mprfchw"),
}
FLAGS: dict[str, tuple[str, ...]] = {
    "generic": (),
    **(_X86 if platform.machine() in ("x86_64", "AMD64") else {}),
}

COMMON = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-ffp-contract=off",  # what is fused is said in the source: bits must not depend on inlining
    "-Wall",
    "-Wextra",
)
_HIDDEN = "-fvisibility=hidden"
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1")


class BuildError(Exception):
    """A library could not be built; says why and what to do."""


def library_name(isa: str) -> str:
    return f"_cpu_{isa}.so"


Library = tuple[tuple[Path, ...], tuple[str, ...]]
"""Sources, and flags of its own."""

LIBRARIES: dict[str, Library] = {
    **{library_name(isa): (SOURCES, (*flags, _HIDDEN)) for isa, flags in FLAGS.items()},
    TRANSFER: (TRANSFER_SOURCES, ("-ldl",)),
    MULTIPATH: (MULTIPATH_SOURCES, _MULTIPATH_FLAGS),
}


def tile_model_flags() -> tuple[str, ...]:
    """Return the flags of the AMX kernels on a model of the tile instructions in plain C++, for
    tests. They take this machine's own instructions, AVX-512 if it has it."""
    return (_HIDDEN, "-O1", "-DC2C_TILE_MODEL", *(("-march=native",) if _X86 else ()))


def build(
    target: Path, *, sanitize: bool = False, libraries: Mapping[str, Library] | None = None
) -> list[Path]:
    """Compile every library, or only `libraries`, into `target`. Raises `BuildError`."""
    libraries = LIBRARIES if libraries is None else libraries
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler: install g++ or clang++ (or set CXX) and try again")
    target.mkdir(parents=True, exist_ok=True)

    def compile_library(name: str) -> Path:
        library = target / name
        partial = library.with_suffix(f".{os.getpid()}.tmp")
        sources, own_flags = libraries[name]
        flags = [*COMMON, *(SANITIZE if sanitize else ())]
        done = subprocess.run(
            [compiler, *flags, *map(str, sources), *own_flags, "-o", str(partial)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise BuildError(f"{compiler} failed on {name}:\n{done.stderr}")
        partial.rename(library)  # never a half-written library under the final name
        return library

    with ThreadPoolExecutor(len(libraries)) as executor:
        return list(executor.map(compile_library, libraries))


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            libraries = build(HERE)
        case ["--sanitize", folder]:
            libraries = build(Path(folder), sanitize=True)
        case _:
            sys.exit("usage: python -m c2cserve.kernels.build [--sanitize FOLDER]")
    for library in libraries:
        sys.stdout.write(f"{library}\n")
