"""Builds the native code into the package; everything else is in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

kernels = runpy.run_path("src/c2cserve/kernels/build.py")


class BuildKernels(build_ext):
    """Plain shared libraries (no Python ABI), loaded with ctypes."""

    def run(self) -> None:
        root = Path("src") if self.inplace else Path(self.build_lib)
        kernels["build"](root / "c2cserve" / "kernels")

    def get_outputs(self) -> list[str]:
        folder = Path(self.build_lib) / "c2cserve" / "kernels"
        return [str(folder / name) for name in kernels["LIBRARIES"]]


setup(
    ext_modules=[Extension("c2cserve.kernels._cpu", sources=[])],
    cmdclass={"build_ext": BuildKernels},
)
