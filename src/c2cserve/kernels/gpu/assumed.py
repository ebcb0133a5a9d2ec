"""A profile nobody measured here: an H200's known speeds, to ask about one without having one."""

import datetime

from c2cserve.kernels.gpu.profile import (
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
"""Slices of 16 SMs at once -> what each reads."""


def assumed_h200() -> Profile:
    """One H200 (driver 580, CUDA 13.0), its host over PCIe 5 x16, a peer over NVLink 4.

    No dataflow was timed: it has rates and no points. The other direction of NVLink is taken to
    be as fast as the one that was measured.
    """
    return Profile(
        machine=MachineFacts(gpu="NVIDIA H200", sms=_SMS, driver="580", host="assumed"),
        date=datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC),
        commit="",
        links={
            "host": LinkRates(
                to_gpu_bytes_per_s=55.6 * _GB,
                from_gpu_bytes_per_s=55.4 * _GB,
                duplex_bytes_per_s=101.7 * _GB,
                reads=(ReadRate(4, 1, 51.4 * _GB), ReadRate(_SMS, 1, 51.4 * _GB)),
            ),
            "peer": LinkRates(
                to_gpu_bytes_per_s=396 * _GB,
                from_gpu_bytes_per_s=396 * _GB,
                duplex_bytes_per_s=792 * _GB,
                reads=(
                    *(ReadRate(16, n, rate * _GB) for n, rate in _PEER_SHARED_GB_PER_S.items()),
                    ReadRate(32, 1, 375 * _GB),
                    ReadRate(_SMS, 1, 375 * _GB),
                ),
            ),
        },
        hbm=(HbmRate(_SMS, 4500 * _GB, 4260 * _GB),),
        matmul_flops=tuple(
            MatmulRate(m, _SMS, 2 * m * _N * _K / (ms * 1e-3)) for m, ms in _CUBLAS_MS.items()
        ),
        version=SCHEMA,
    )
