"""The CPU kernels' shared library, for the best instruction set that this machine has.

This module does not import torch: the pool's loader, which does without it, converts dtypes here.
"""

import ctypes
import functools
import logging
import os
import platform
import struct
from collections.abc import Sequence
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int64,
    c_long,
    c_uint32,
    c_void_p,
)  # fmt: skip
from pathlib import Path

from c2cserve.core.tensors import Dtype

log = logging.getLogger(__name__)

DTYPE_CODES: dict[Dtype, int] = {"float32": 0, "float16": 1, "bfloat16": 2}

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"})
_TILES = frozenset({"amx_tile", "amx_bf16"})
_NEEDS: dict[str, frozenset[str]] = {
    "amx": _AVX512 | _TILES | {"avx512_bf16"},
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "generic": frozenset(),
}
ISAS = tuple(_NEEDS)
"""Best first."""

ROUNDING_ISAS = frozenset({"amx", "avx512_bf16"})
"""Those that round activations to bfloat16 where they meet weights in bfloat16."""

_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18
"""System call, ARCH_REQ_XCOMP_PERM and the number of the tiles' state (Linux 5.16)."""

SAMPLE_ROW = struct.Struct("=7Q4q2Q2q6f")
"""`SampleRow` of sample.h.

    7Q  pointers: logits, prompt, output, bias ids, bias, banned, mask
    4q  lengths: prompt, output, bias, banned
    2Q  seed, position
    2q  top_k, top_logprobs
    6f  temperature, top_p, min_p, penalties: repetition, presence, frequency
"""

LIBRARY_FOLDER = Path(__file__).parent

_P, _I, _L, _F = c_void_p, c_int, c_int64, c_float
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "c2c_pool_new": (_P, (_I, POINTER(_I), _I)),
    "c2c_pool_free": (None, (_P,)),
    "c2c_embed": (_L, (_P, _P, _P, _I, _L, _P, _L, _L)),
    "c2c_linear": (None, (_P, _P, _L, _P, _L, _P, _L, _I, _P, _I, _L, _L, _L)),
    "c2c_gated": (None, (_P, _P, _P, _P, _I, _P, _I, _L, _L, _L)),
    "c2c_router_logits": (None, (_P, _P, _P, _P, _I, _L, _L, _L)),
    "c2c_rms_norm": (None, (_P, _P, _P, _P, _F, _L, _L)),
    "c2c_add_rms_norm": (None, (_P, _P, _P, _P, _P, _F, _L, _L)),
    "c2c_silu_mul": (None, (_P, _P, _P, _L, _L)),
    "c2c_rope_store": (
        _L, (_P, _P, _P, _P, _P, _L, _P, _P, _F, _P, _L, _I, _L, _L, _P, _L, _L, _L, _L),
    ),
    "c2c_attention": (
        _L, (_P, _P, _P, _L, _P, _L, _I, _L, _L, _P, _P, _P, _L, _L, _L, _L, _L, _L, _F, _L),
    ),
    "c2c_moe_route": (None, (_P, _P, _L, _L, _L, _I, _P, _P)),
    "c2c_moe_experts": (_L, (_P, _P, _P, _P, _P, _P, _P, _I, _L, _L, _L, _L, _L)),
    "c2c_layers": (_I, (_P, c_char_p, _L, c_char_p, POINTER(_L))),
    "c2c_attend": (_I, (_P, c_char_p, c_char_p, _P, POINTER(_L))),
    "c2c_sample": (_L, (_P, c_char_p, _L, _L, _P, _P, _P, _P, _L)),
    "c2c_convert": (None, (_P, _I, _P, _I, _L)),
    "c2c_read": (_F, (_P, _P, _L)),
    "c2c_multiply": (c_double, (_P, _L)),
}  # fmt: skip

_SOME_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "c2c_copy_strips": (None, (_P, _I)),
    "c2c_tile_steps": (c_double, (_P, _L, _L, _L)),
    "c2c_crc32": (c_uint32, (_P, _L)),
    "c2c_trace_begin": (None, (_P, _L)),
    "c2c_trace_count": (_L, (_P,)),
    "c2c_trace_end": (None, (_P, _P)),
}
"""Functions that only some libraries have: those that multiply on tiles, and those for x86. Older
builds, which a benchmark may load, have no traces."""


class KernelsMissing(RuntimeError):
    """The native kernels are not built."""


def _cpu_words(keys: Sequence[str], cpuinfo: Path) -> frozenset[str]:
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return frozenset(value.split())
    return frozenset()


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the instruction-set flags of this machine, as Linux names them."""
    return _cpu_words(("flags", "Features"), cpuinfo)


def is_intel(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this is an Intel CPU."""
    return "GenuineIntel" in _cpu_words(("vendor_id",), cpuinfo)


def request_tiles() -> int:
    """Ask the system for the tile registers of AMX, for this process. Return 0, or an errno: an
    older kernel, a sandbox, or a signal stack that is too small for them may refuse."""
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.syscall(c_long(_ARCH_PRCTL), c_long(_REQUEST_STATE), c_long(_TILE_DATA))
    return ctypes.get_errno() if refused else 0


@functools.cache
def tiles_granted() -> bool:
    """Return whether this process may use tiles; it asks once."""
    error = request_tiles()
    if error:
        log.warning("the system refuses AMX tiles (%s): AVX-512 is used", os.strerror(error))
    return not error


def usable_flags() -> frozenset[str]:
    """Return `cpu_flags`, without those of AMX where the system refuses its registers."""
    flags = cpu_flags()
    return flags if not flags >= _TILES or tiles_granted() else flags - _TILES


def has_tiles() -> bool:
    """Return whether this CPU has tiles for bfloat16."""
    return cpu_flags() >= _TILES


def best_isa(flags: frozenset[str], cap: str | None = None, *, intel: bool = False) -> str:
    """Return the best variant that these flags allow, no better than `cap` (C2CSERVE_CPU_ISA).

    An Intel CPU without tiles uses AVX-512: its bf16 dot products take longer than the float32
    multiply-adds that they replace (docs/cpu_kernels.md). They are used if the cap names them."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "generic"
    if cap is not None and cap not in ISAS:
        raise ValueError(f"C2CSERVE_CPU_ISA is {cap!r}; it can be one of {', '.join(ISAS)}")
    if cap in (None, "amx") and intel and not flags >= _TILES:
        cap = "avx512"
    allowed = ISAS[ISAS.index(cap) :] if cap else ISAS
    return next(isa for isa in allowed if _NEEDS[isa] <= flags)


@functools.cache
def load_library(isa: str) -> ctypes.CDLL:
    """Load one variant. Raises `KernelsMissing` with the command that builds it, and OSError where
    the system refuses the registers that it uses."""
    if isa == "amx" and not tiles_granted():
        raise OSError("the system refuses AMX tiles")
    path = LIBRARY_FOLDER / f"_cpu_{isa}.so"
    if not path.exists():
        raise KernelsMissing(
            f"the CPU kernels are not built ({path.name} is missing); "
            "run: python -m c2cserve.kernels.build"
        )
    library = ctypes.CDLL(str(path))
    some = {k: v for k, v in _SOME_SIGNATURES.items() if hasattr(library, k)}
    for name, (result, arguments) in (_SIGNATURES | some).items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def chosen_isa() -> str:
    """Return the variant that this process uses. The system is asked for tiles only where they
    would be used."""
    cap = os.environ.get("C2CSERVE_CPU_ISA") or None
    flags = usable_flags() if cap in (None, "amx") else cpu_flags()
    return best_isa(flags, cap, intel=is_intel())


def convert(target: int, target_dtype: Dtype, source: int, source_dtype: Dtype, n: int) -> None:
    """Convert `n` elements from address to address, rounding to nearest even. The source may be
    unaligned. The call releases the interpreter lock."""
    load_library(chosen_isa()).c2c_convert(
        target, DTYPE_CODES[target_dtype], source, DTYPE_CODES[source_dtype], n
    )
