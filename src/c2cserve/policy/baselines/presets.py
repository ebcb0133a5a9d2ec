"""Which strategies make up a scheduler: ours, and the papers' as baselines in the same code.

A preset is data, from which `policy.baselines.compose` makes policies. A simulated world reads what
the mechanism underneath can do."""

from dataclasses import dataclass, replace
from typing import Literal

from c2cserve.core.machine import SliceKind
from c2cserve.policy.slice.rotation import PACED, RotationSettings

Placing = Literal["c2cserve", "streams", "slinfer", "limits", "scatter", "groups"]
"""`c2cserve`: `policy.cluster.placement`. `streams`: the same if all weights stream
(`policy.baselines.c2cserve.streaming`). `slinfer`: `policy.baselines.slinfer.consolidation`.
`limits`: instances take a fixed number of requests (`policy.baselines.serverlessllm`). `scatter`:
any slice with a free place, drawn by a hash (`policy.baselines.serverlessllm`). `groups`: prompts
of a model together (`policy.baselines.aegaeon.placing`)."""

RunOrder = Literal["headroom", "arrival", "quota"]
"""Which model and which of its requests run next on a slice: least headroom first, or first come
first served. `quota`: models have turns of some seconds (`policy.baselines.aegaeon.turns`)."""
Chunks = Literal["headroom", "smallest", "fixed", "whole"]
"""How large chunks of prompts are: as headroom allows, the smallest in time (C2CServe section 6.3),
the slice's largest, or one whole prompt a step."""

ANY_SLICE: tuple[SliceKind, ...] = ("gpu", "green", "mig", "cpu")
GPU_ONLY: tuple[SliceKind, ...] = ("gpu", "green", "mig")


@dataclass(frozen=True, slots=True)
class Limit:
    """Requests an instance may have at a time, of models up to `weight_bytes`."""

    weight_bytes: int
    cpu: int
    gpu: int


@dataclass(frozen=True, slots=True)
class Preset:
    name: str

    # ---- read by the controller's policy
    placing: Placing = "c2cserve"
    kinds: tuple[SliceKind, ...] = ANY_SLICE
    """Slices it uses."""
    limits: tuple[Limit, ...] = ()
    """Limits by size of model, smallest first; larger models have the last one's. None: no
    limit."""
    patience: float | None = None
    """Replaces `AdmissionSettings.patience`; None leaves what the server was told."""
    keep_alive_s: float = float("inf")
    """How long an instance without requests stays on a slice that no other model needs."""
    consolidate: bool = True
    """SLINFER section 8: preempt smaller neighbours, fill the largest batch first."""
    share: bool = True
    """Several instances on a slice."""
    watermark: float = 0.25
    """SLINFER section 7 B: what is added to the KV memory that is required."""
    seed: int = 0
    """Seed of `scatter`."""

    # ---- read by the slices' policy
    turn: RunOrder = "headroom"
    chunks: Chunks = "headroom"
    rotation: RotationSettings | None = None
    """Largest virtual lag time first, KV rotated to the host where a slice has memory there
    (SuperInfer section 4.2)."""
    alpha: bool = True
    """Where GEMMs are hybrid, their split follows contention on the link (C2CServe section 7)."""
    hybrid_alpha: float | None = None
    """GEMMs of a server's GPU slices are hybrid, and begin with this alpha. None: they are ours. In
    simulations all presets have hybrid GEMMs, or none has (`Scenario.hybrid`)."""

    streams: bool = True
    """Weights are read from host memory as steps need them, and cached; else an instance starts
    with loading all of them."""
    keeps: bool = False
    """Weights are loaded and kept after all where the link has no room for one stream more
    (`policy.cluster.placement`)."""

    # ---- read by the world
    parts: int = 1
    """Equal parts that each node is cut into for good (static sharing)."""


C2CSERVE = Preset("c2cserve", keeps=True, rotation=PACED)

SERVERLESSLLM = Preset(
    "serverlessllm", "limits", GPU_ONLY,
    limits=(Limit(8 << 30, 0, 160), Limit(16 << 30, 0, 32), Limit(32 << 30, 0, 16)),
    patience=1.0, keep_alive_s=1.0, share=False, turn="arrival", chunks="whole", streams=False,
    alpha=False,
)  # fmt: skip
"""ServerlessLLM with the concurrency limits that SLINFER section IX-A tunes for it."""

SLLM_C = Preset(
    "sllm+c", "limits",
    limits=(Limit(8 << 30, 59, 160), Limit(16 << 30, 15, 32), Limit(32 << 30, 6, 16)),
    patience=1.0, keep_alive_s=1.0, share=False, turn="arrival", chunks="whole", streams=False,
    alpha=False,
)  # fmt: skip
"""ServerlessLLM that uses CPUs too, and first (SLINFER section IX-A)."""

SLLM_C_S = Preset(
    "sllm+c+s", "limits",
    limits=(Limit(8 << 30, 23, 71), Limit(16 << 30, 4, 12), Limit(32 << 30, 6, 4)),
    patience=1.0, keep_alive_s=1.0, share=False, turn="arrival", chunks="whole", streams=False,
    parts=2, alpha=False,
)  # fmt: skip
"""The same on halves of nodes (SLINFER section IX-A)."""

SLINFER = Preset(
    "slinfer", "slinfer", patience=1.0, keep_alive_s=1.0, chunks="whole", streams=False, alpha=False
)

SUPERINFER = Preset(
    "superinfer", "scatter", share=False, turn="arrival", chunks="fixed",
    rotation=RotationSettings(), alpha=False,
)  # fmt: skip
"""SuperInfer's slices, with a load balancer in front: it has one model per device and no placing
of its own."""

AEGAEON = Preset(
    "aegaeon", "groups", patience=0.0, turn="quota", chunks="whole", streams=False, alpha=False
)
"""Aegaeon's turns of models. It has no admission: nothing is refused for lateness."""

AEGAEON_HYBRID = replace(AEGAEON, name="aegaeon-hybrid", streams=True, alpha=True, hybrid_alpha=0.0)
"""Aegaeon's turns where weights stream through C2CServe's GEMMs (C2CServe's figure 13)."""

FCFS = Preset("fcfs", "scatter", turn="arrival", chunks="fixed", alpha=False)

C2CSERVE_PUBLISHED = Preset("c2cserve-published", "streams", chunks="smallest", hybrid_alpha=0.0)
"""C2CServe's placement, chunks and control of alpha, with weights that always stream."""

C2CSERVE_STATIC = Preset(
    "c2cserve-static", "scatter", chunks="fixed", alpha=False, hybrid_alpha=0.0
)
"""C2CServe without placement, chunk sizing and control of alpha (its section 9.4)."""

ABLATIONS = (
    replace(C2CSERVE_PUBLISHED, name="c2cserve-alpha-0", alpha=False),
    replace(C2CSERVE_PUBLISHED, name="c2cserve-alpha-0.5", alpha=False, hybrid_alpha=0.5),
    replace(C2CSERVE_PUBLISHED, name="c2cserve-alpha-1", alpha=False, hybrid_alpha=1.0),
    replace(C2CSERVE_PUBLISHED, name="c2cserve-no-chunks", chunks="fixed"),
    replace(C2CSERVE_PUBLISHED, name="c2cserve-no-placement", placing="scatter"),
)
"""C2CServe without one of its parts (its figure 14): alpha fixed, chunks as large as a step may be,
requests wherever there is room."""

PRESETS = {
    preset.name: preset
    for preset in (
        C2CSERVE, SERVERLESSLLM, SLLM_C, SLLM_C_S, SLINFER, AEGAEON, AEGAEON_HYBRID, SUPERINFER,
        FCFS,
        C2CSERVE_PUBLISHED, C2CSERVE_STATIC, *ABLATIONS,
    )
}  # fmt: skip
