"""Programs on an emulated driver, with and without the library that spreads their copies."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from c2cserve.kernels.build import HERE, MULTIPATH

_SOURCES = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O1", "-pthread")
LIBRARY = HERE / MULTIPATH


@dataclass(frozen=True, slots=True)
class Ran:
    returncode: int
    lines: list[str]
    """What the program printed."""
    said: str
    """Standard error."""


class Programs:
    """Compiles the driver and programs into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._compile(
            "fake_driver.cpp", "libcuda.so.1", "-fPIC", "-shared", "-Wl,-Bsymbolic",
            "-Wl,-soname,libcuda.so.1", "-Wl,--default-symver",
        )  # fmt: skip
        for name in ("random_program", "one_copy"):
            self._compile(f"{name}.cpp", name, str(folder / "libcuda.so.1"), "-ldl")
        self._compile("past_the_library.cpp", "past_the_library", "-ldl")
        self._compile("fake_runtime.cpp", "libcudart.so.13", "-fPIC", "-shared", "-ldl")

    def _compile(self, source: str, target: str, *flags: str) -> None:
        command = ["g++", *_FLAGS, str(_SOURCES / source), *flags, "-o", str(self._folder / target)]
        subprocess.run(command, check=True, timeout=200)

    def run(
        self, name: str, arguments: Sequence[str] = (), *, preloaded: bool = True, **more: str
    ) -> Ran:
        """Run a program. `more` are variables of its environment."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("C2CSERVE_", "FAKE_", "CUDA_"))
        }
        environment["LD_LIBRARY_PATH"] = str(self._folder)
        environment["C2CSERVE_MULTIPATH_LEAST_BYTES"] = str(64 << 10)
        environment["C2CSERVE_MULTIPATH_BUFFER_BYTES"] = str(8 << 10)
        if preloaded:
            environment["LD_PRELOAD"] = str(LIBRARY)
        done = subprocess.run(
            [str(self._folder / name), *arguments], env=environment | more, text=True,
            capture_output=True, timeout=100, check=False,
        )  # fmt: skip
        return Ran(done.returncode, done.stdout.splitlines(), done.stderr)
