"""The phases of a run: how the server is started, and what it is put through."""

from dataclasses import dataclass, replace

from soak.catalogue import CPU_SHAPES, GPU_SHAPES, Catalogue, Shape
from soak.chaos import Trouble
from soak.kinds import Limits
from soak.load import Bounds

_MIB, _GIB = 1 << 20, 1 << 30
_SLAB = 2 * _MIB


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    arguments: tuple[str, ...]
    """Of `c2cserve serve`."""
    layout: str
    """Slices of one size say the same to the bit, of another size perhaps not (on GPUs)."""
    arena_bytes: int = 0
    """All KV arenas on the host, and what paused requests take there."""
    pool_share: float = 1.0
    """Of the catalogue's weights, what the pool has room for."""
    ease: int = 1
    """Divides the longest outputs and the work in flight, where steps are slow."""


def eased(bounds: Bounds, ease: int) -> Bounds:
    limits = replace(bounds.limits, output=max(8, bounds.limits.output // ease))
    return replace(bounds, limits=limits, work=bounds.work // ease)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a machine of a kind is asked for."""

    shapes: tuple[Shape, ...]
    bounds: Bounds
    trouble: Trouble
    end_s: float
    """Within which every answer must end, from the moment it is asked for."""
    ready_s: float
    bank_each: int
    """Questions of a model that are asked alone at first."""
    check_share: float
    """Of a phase, for checking answers after the load."""


CPU = Setting(
    CPU_SHAPES, Bounds(Limits(output=160, prompt=2048), work=40_000),
    Trouble(kill_every_s=12.0, stop_every_s=15.0, admin_every_s=5.0, hang_timeout_s=8.0,
            settle_s=3.0, checkpoint_every_s=0.7, fill_every_s=6.0, attackers=4),
    end_s=120.0, ready_s=60.0, bank_each=8, check_share=0.3,
)  # fmt: skip
GPU = Setting(
    GPU_SHAPES, Bounds(Limits(output=256, prompt=8192), work=300_000),
    Trouble(kill_every_s=60.0, stop_every_s=60.0, admin_every_s=12.0, hang_timeout_s=5.0,
            settle_s=40.0, checkpoint_every_s=3.0, fill_every_s=60.0, attackers=4),
    end_s=240.0, ready_s=240.0, bank_each=6, check_share=0.2,
)  # fmt: skip


def cpu_phases(catalogue: Catalogue) -> tuple[Phase, ...]:
    """Arenas from the least that holds the longest request to one that holds everything."""
    least = -(-catalogue.longest_kv_bytes // _SLAB) * _SLAB + _SLAB
    roomy = 64 * _MIB
    return (
        _cpu("roomy", 2, roomy),
        _cpu("small pool", 2, 2 * least, pool_share=0.6),
        _cpu("rotating", 1, least, host_kv=roomy),
        _cpu("least arena", 1, least, pool_share=0.8),
    )


def _cpu(
    name: str, slices: int, kv: int, *, host_kv: int = 0, pool_share: float = 1.0
) -> Phase:  # fmt: skip
    arguments = ["--gpu-slices", "none", "--slices", str(slices), "--kv-bytes", str(kv)]
    arguments += ["--host-kv-bytes", str(host_kv)] if host_kv else []
    return Phase(name, tuple(arguments), "cpu", slices * (kv + host_kv), pool_share)


def gpu_phases(hbm_bytes: int, share: float) -> tuple[Phase, ...]:
    """`share`: of the GPU's memory, what this run may take."""
    usable = int(hbm_bytes * share) - 12 * _GIB
    most = min(usable, 32 * _GIB)
    if most < 8 * _GIB:
        raise ValueError(
            f"{share:g} of {hbm_bytes / _GIB:.0f} GiB of GPU memory leave too little for arenas:"
            " give a larger --memory-share"
        )
    return (
        _gpu("roomy", "whole", most),
        _gpu("streaming", "whole", 3 * _GIB // 2, ease=4),
        _gpu("rotating", "whole", 3 * _GIB, host_kv=4 * _GIB, pool_share=0.7, ease=2),
        _gpu("parts", "16x3", min(most // 3, 6 * _GIB), ease=2),
    )


def _gpu(
    name: str, layout: str, kv: int, *, host_kv: int = 0, pool_share: float = 1.0, ease: int = 1
) -> Phase:  # fmt: skip
    arguments = ["--gpu-slices", layout, "--gpu-kv-bytes", str(kv // _SLAB * _SLAB)]
    arguments += ["--host-kv-bytes", str(host_kv)] if host_kv else []
    return Phase(name, tuple(arguments), layout, host_kv, pool_share, ease)
