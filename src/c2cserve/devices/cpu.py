"""Processors: name, instruction sets, and how hardware threads form cores."""

from collections.abc import Sequence
from pathlib import Path

from c2cserve.devices.procfs import parse_cpu_list, parse_fields, read_text

# Instruction sets that choose a kernel, or that a person reading a report wants to see.
_ISA = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "sve", "sve2", "bf16", "svebf16", "i8mm",
)  # fmt: skip

# Arm kernels print no model name: (implementer, part) of server cores, from Arm's MIDR_EL1 tables.
_ARM_PARTS = {
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2",
    ("0x41", "0xd84"): "Arm Neoverse V3",
    ("0xc0", "0xac3"): "Ampere-1",
}


def name_and_isa(proc: Path) -> tuple[str, tuple[str, ...]]:
    """Return the model name and the relevant instruction sets, from `/proc/cpuinfo`."""
    first_block = (read_text(proc / "cpuinfo") or "").split("\n\n", maxsplit=1)[0]
    fields = parse_fields(first_block)
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    isa = tuple(name for name in _ISA if name in flags)
    if name := fields.get("model name"):
        return name, isa
    part = (fields.get("CPU implementer", "?"), fields.get("CPU part", "?"))
    return _ARM_PARTS.get(part, f"unknown CPU (implementer {part[0]}, part {part[1]})"), isa


def group_cores(sys: Path, cpus: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the allowed hardware threads grouped by physical core, in order of each core's first.

    A thread with unknown siblings counts as a core of its own.
    """
    allowed = set(cpus)
    cores: dict[tuple[int, ...], None] = {}
    for cpu in sorted(allowed):
        topology = sys / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology"
        text = read_text(topology / "core_cpus_list") or read_text(
            topology / "thread_siblings_list"
        )
        siblings = parse_cpu_list(text) if text else (cpu,)
        cores[tuple(sorted(allowed.intersection({*siblings, cpu})))] = None
    return tuple(cores)
