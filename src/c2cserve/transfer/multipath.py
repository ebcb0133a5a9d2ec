"""Programs that are not ours, with their large copies over the links of several GPUs.

A library that is preloaded does it (`transfer/preload/`, docs/multipath.md). It is told what it
needs by variables of the program's environment.
"""

from collections.abc import Mapping

from c2cserve.kernels.build import MULTIPATH
from c2cserve.kernels.native import LIBRARY_FOLDER

_PRELOAD = "LD_PRELOAD"


class MultipathError(Exception):
    """A program cannot be started so. The message says what to do."""


def multipath_environment(
    environment: Mapping[str, str], *, neighbours: int | None = None,
    least_bytes: int | None = None, report: bool = False,
) -> dict[str, str]:  # fmt: skip
    """Return the environment of a program whose large copies take several links.

    `environment` is what the program would have otherwise. Raises `MultipathError` if the library
    is not built.
    """
    library = LIBRARY_FOLDER / MULTIPATH
    if not library.exists():
        raise MultipathError(f"{MULTIPATH} is not built: run python -m c2cserve.kernels.build")
    changed: dict[str, str] = {}
    if neighbours is not None:
        changed["C2CSERVE_MULTIPATH_NEIGHBOURS"] = str(neighbours)
    if least_bytes is not None:
        changed["C2CSERVE_MULTIPATH_LEAST_BYTES"] = str(least_bytes)
    if report:
        changed["C2CSERVE_MULTIPATH_REPORT"] = "1"
    others = environment.get(_PRELOAD)
    changed[_PRELOAD] = f"{library}:{others}" if others else str(library)
    return {**environment, **changed}
