"""Profiles of GPUs that were measured elsewhere, for a GPU that was not measured here."""

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from c2cserve.core.tensors import LinkHome
from c2cserve.kernels.gpu.gemm.choice.profile import (
    SCHEMA,
    HbmRate,
    LinkRates,
    MachineFacts,
    MatmulRate,
    Profile,
    ReadRate,
)

_GB = 1e9
_SMS = 132
_N, _K = 16384, 4096
_CUBLAS_MS = {8: 0.049, 64: 0.049, 512: 0.105, 2048: 0.372, 10240: 1.71}
"""Rows -> O[M, 16384] = X[M, 4096] W[16384, 4096]^T in bfloat16, W in HBM."""
_PEER_SHARED_GB_PER_S = {1: 337, 2: 185, 3: 126, 4: 95, 7: 55}
"""Number of slices of 16 SMs that read at once -> GB/s that each reads."""
_H100_READ, _H100_COPIED = 2900 * _GB, 3000 * _GB
_H200, _H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


@dataclass(frozen=True, slots=True)
class Assumed:
    """A profile for decisions on a machine where nothing was measured."""

    profile: Profile
    exact: bool
    """Whether the profile is of this model of GPU. Otherwise it is of the nearest one."""

    @property
    def note(self) -> str:
        """One line on the origin of the speeds, for logs and results."""
        near = "" if self.exact else ", the nearest GPU that is known"
        return f"known speeds of an {self.profile.machine.gpu}{near}; nothing was measured here"


def assumed_profile(gpu: str, memory_bytes: int = 0) -> Assumed:
    """Return the known speeds of the GPU that the driver calls `gpu`, or of the nearest one.

    Nearest is the GPU of the same chip by its name ("NVIDIA H100 PCIe"), else the one whose memory
    is closest to `memory_bytes`. MIG instances count as the whole GPU they are parts of.
    """
    exact = _PROFILED.get(gpu)
    if exact is not None:
        return Assumed(exact.profile(), exact=True)
    words = gpu.upper().split()
    for one in _PROFILED.values():
        if one.chip in words:
            return Assumed(one.profile(), exact=False)
    nearest = min(_PROFILED.values(), key=lambda one: abs(one.memory_bytes - memory_bytes))
    return Assumed(nearest.profile(), exact=False)


def assumed_h200() -> Profile:
    """Return the speeds of one H200 (driver 580, CUDA 13.0), its host over PCIe 5 x16, a peer over
    NVLink 4.

    No dataflow was timed, so the profile has rates and no points. One direction of NVLink was
    measured, and the other is assumed to be as fast.
    """
    return _profile(_H200, _host(55.6, 55.4, 101.7, 51.4), HbmRate(_SMS, 4500 * _GB, 4260 * _GB))


def assumed_h100() -> Profile:
    """Return the speeds of one H100 80GB SXM, its host over PCIe 5 x16, a peer over NVLink 4.

    The link to the GPU, HBM (reads alone, and copies) and cuBLAS were measured. The latter is as
    fast as on an H200, which has the same SMs. The link's other rates are an H200's, scaled. The
    peer's are an H200's.
    """
    scale = 55.2 / 55.6
    host = _host(55.2, 55.4 * scale, 101.7 * scale, 51.4 * scale)
    # A copied byte is read and written. So a write takes what a read leaves of a copy's time.
    written = 1.0 / (2.0 / _H100_COPIED - 1.0 / _H100_READ)
    return _profile(_H100, host, HbmRate(_SMS, _H100_READ, written))


@dataclass(frozen=True, slots=True)
class _ProfiledGpu:
    chip: str
    memory_bytes: int
    profile: Callable[[], Profile]


_PROFILED: Mapping[str, _ProfiledGpu] = {
    _H200: _ProfiledGpu("H200", 141 * 10**9, assumed_h200),
    _H100: _ProfiledGpu("H100", 80 * 10**9, assumed_h100),
}


def _profile(gpu: str, host: LinkRates, hbm: HbmRate) -> Profile:
    links: dict[LinkHome, LinkRates] = {"host": host, "peer": _nvlink()}
    return Profile(
        machine=MachineFacts(gpu=gpu, sms=_SMS, driver="580", host="assumed"),
        date=datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC),
        commit="",
        links=links,
        hbm=(hbm,),
        matmul_flops=tuple(
            MatmulRate(m, _SMS, 2 * m * _N * _K / (ms * 1e-3)) for m, ms in _CUBLAS_MS.items()
        ),
        version=SCHEMA,
    )


def _host(to_gpu: float, from_gpu: float, duplex: float, read: float) -> LinkRates:
    """Return the rates of a host link, from rates in GB/s."""
    return LinkRates(
        to_gpu_bytes_per_s=to_gpu * _GB,
        from_gpu_bytes_per_s=from_gpu * _GB,
        duplex_bytes_per_s=duplex * _GB,
        reads=(ReadRate(4, 1, read * _GB), ReadRate(_SMS, 1, read * _GB)),
    )


def _nvlink() -> LinkRates:
    return LinkRates(
        to_gpu_bytes_per_s=396 * _GB,
        from_gpu_bytes_per_s=396 * _GB,
        duplex_bytes_per_s=792 * _GB,
        reads=(
            *(ReadRate(16, n, rate * _GB) for n, rate in _PEER_SHARED_GB_PER_S.items()),
            ReadRate(32, 1, 375 * _GB),
            ReadRate(_SMS, 1, 375 * _GB),
        ),
    )
