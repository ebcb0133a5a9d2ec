"""What GPU slices need besides a GPU, checked without touching one (and without torch)."""

import importlib.util
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from c2cserve.core.machine import Gpu, ProfileChoice
from c2cserve.devices.gpu_slices import visible_gpus
from c2cserve.devices.gpus import find_gpus, find_nvml

CPUS_INSTEAD = "serve on CPUs alone with --gpu-slices none"


@dataclass(frozen=True, slots=True)
class Obstacle:
    text: str
    fix: str


def usable_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA would show a process started from here. Raises `GpuProblem`."""
    return visible_gpus(find_gpus(find_nvml()), os.environ.get("CUDA_VISIBLE_DEVICES"))


def obstacles(
    gpus: Iterable[Gpu], profile: ProfileChoice = "measured", *, lent: bool = False
) -> Iterator[Obstacle]:
    """Yield what keeps these GPUs from serving. `lent`: some lend memory to others, so that the
    link between them is used."""
    packages = list(_packages())
    yield from packages
    yield from _kernels()
    if profile == "measured":
        yield from _profiles({gpu.name for gpu in gpus}, lent)


def _packages() -> Iterator[Obstacle]:
    fix = "pip install '.[gpu]' in the checkout, with the torch that is built for CUDA"
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    if not torch or torch.endswith("+cpu"):
        yield Obstacle(f"torch {torch or 'is not installed'} cannot use a GPU", fix)
    for module in ("triton", "cuda.bindings", "cuda.core"):
        if not _is_there(module):
            yield Obstacle(f"the Python module {module} is not installed", fix)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package it is in
        return False


def _kernels() -> Iterator[Obstacle]:
    from c2cserve.kernels.gpu.aot.compiler import cubin_path, default_folder
    from c2cserve.kernels.gpu.gemm.dataflows.table import SERVING_VARIANTS

    folder = default_folder()
    lacking = [variant for variant in SERVING_VARIANTS if not cubin_path(folder, variant).exists()]
    if lacking:
        text = f"{len(lacking)} of {len(SERVING_VARIANTS)} GPU kernels are not built in {folder}"
        yield Obstacle(text, "c2cserve kernels build")


def _profiles(names: Iterable[str], lent: bool) -> Iterator[Obstacle]:
    from c2cserve.kernels.gpu.gemm.choice.profile import ProfileError, load_profile

    for name in sorted(names):
        try:
            links = load_profile(gpu=name).links
        except ProfileError as error:
            fix = (
                "c2cserve profile (or serve with --gpu-profile assumed: an H200's or H100's rates)"
            )
            yield Obstacle(str(error), fix)
            continue
        if lent and "peer" not in links:
            text = f"the profile of {name} has no speed of a neighbour's memory"
            yield Obstacle(text, "c2cserve profile, where it sees two GPUs")
