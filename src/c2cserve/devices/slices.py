"""How a machine's cores become slices, and its memory becomes KV arenas and a weight pool.

The default rule:

* A slice never crosses NUMA nodes, and computes with one hardware thread of each of its cores.
  Decoding waits for memory, so a core's second thread adds nothing. The second threads are left to
  the server, its tokenizers and loaders.
* There is about one slice per 16 cores, and at least one for each node. A request has the cores of
  one slice, and models in use take turns there, so few large slices serve few users best. Many
  models in use at once gain from more slices: `benchmarks/cpu_layout.py` measures both.
* A cgroup's CPU quota caps the cores that count.
* KV arenas take an eighth of the available memory together, each between 64 MiB and 8 GiB. The
  pool takes three quarters of it, as far as shared memory has room.
"""

from collections.abc import Sequence
from math import floor

from c2cserve.core.machine import Machine, NumaNode, Slice

CORES_PER_SLICE = 16
CORES_FOR_MANY = 4
"""A slice's cores where many models in use at once count more than each request's speed."""
KV_MEMORY_SHARE = 1 / 8
KV_BYTES_MIN = 64 << 20
KV_BYTES_MAX = 8 << 30
POOL_MEMORY_SHARE = 3 / 4
SLAB_BYTES = 2 << 20
STEP_TOKENS = 640
"""The largest chunk of a prompt. A step reads all weights, so a prompt's last few tokens cost a
decode step. 512 words, and what a template adds to them, go into one step."""


class SlicePlanError(ValueError):
    """The slices asked for do not fit this machine."""


def plan_slices(
    machine: Machine,
    count: int | None = None,
    threads: int | None = None,
    kv_bytes: int | None = None,
) -> tuple[Slice, ...]:
    """Return the CPU slices `cpu0`, `cpu1` ... of this machine.

    Args:
        count: how many; None for the default rule. More than there are cores share them.
        threads: hardware threads of each; None divides the cores evenly.
        kv_bytes: bytes of KV arena of each, rounded down to whole slabs; None for the rule.

    Raises `SlicePlanError` when a slice would not fit on any NUMA node.
    """
    _check_arguments(count, threads, kv_bytes)
    nodes = _usable_cores(machine)
    counts = _slices_per_node([len(cores) for _, cores in nodes], count, threads)
    arena = _arena_bytes(machine, sum(counts), kv_bytes)
    slices: list[Slice] = []
    for (node, cores), share in zip(nodes, counts, strict=True):
        for cpus in _deal(cores, share, threads):
            slices.append(
                Slice(
                    id=f"cpu{len(slices)}",
                    kind="cpu",
                    cpus=cpus,
                    numa=node.id,
                    kv_bytes=arena,
                    slab_bytes=SLAB_BYTES,
                    max_step_tokens=STEP_TOKENS,
                )
            )
    return tuple(slices)


def plan_pool_bytes(machine: Machine) -> int:
    """Return the budget of the weight pool: three quarters of available memory, and at most the
    free shared memory."""
    return min(int(machine.memory_available_bytes * POOL_MEMORY_SHARE), machine.shm_free_bytes)


def memory_beside_kv(machine: Machine, slices: Sequence[Slice]) -> int:
    """Return the available memory that the slices' KV leaves. Raises `SlicePlanError` if that is
    none: pages of KV are taken as they are used, so a server in use would lose its workers."""
    arenas = sum(one.kv_bytes for one in slices if one.gpu is None)
    paused = sum(one.host_kv_bytes for one in slices)
    left = machine.memory_available_bytes - arenas - paused
    if left <= 0:
        raise SlicePlanError(
            f"KV takes {arenas + paused} bytes of host memory, and "
            f"{machine.memory_available_bytes} are available: allow less with "
            f"{'--kv-bytes' if arenas > paused else '--host-kv-bytes'}"
        )
    return left


def _check_arguments(count: int | None, threads: int | None, kv_bytes: int | None) -> None:
    if count is not None and count < 1:
        raise SlicePlanError(f"{count} slices: at least one is needed")
    if threads is not None and threads < 1:
        raise SlicePlanError(f"{threads} threads per slice: at least one is needed")
    if kv_bytes is not None and kv_bytes < SLAB_BYTES:
        raise SlicePlanError(f"{kv_bytes} bytes of KV per slice: at least {SLAB_BYTES} are needed")


def _usable_cores(machine: Machine) -> list[tuple[NumaNode, tuple[int, ...]]]:
    """Return per node one hardware thread of each core, as many as the quota allows (evenly)."""
    cores = machine.cores or tuple((cpu,) for cpu in machine.cpus)
    nodes = [
        (node, tuple(core[0] for core in cores if core[0] in set(node.cpus)))
        for node in machine.numa
    ]
    nodes = [(node, firsts) for node, firsts in nodes if firsts]
    if machine.cpu_quota is None:
        return nodes
    total = sum(len(firsts) for _, firsts in nodes)
    budget = min(total, max(1, floor(machine.cpu_quota)))
    shares = _apportion([len(firsts) for _, firsts in nodes], budget)
    pairs = zip(nodes, shares, strict=True)
    return [(node, firsts[:share]) for (node, firsts), share in pairs if share]


def _slices_per_node(cores: Sequence[int], count: int | None, threads: int | None) -> list[int]:
    fits = [n if threads is None or n >= threads else 0 for n in cores]
    if not any(fits):
        raise SlicePlanError(
            f"{threads} threads per slice: the largest NUMA node has {max(cores)} usable cores"
        )
    if count is not None:
        return _apportion(fits, count)
    if threads is not None:
        return [n // threads for n in fits]
    return [max(1, round(n / CORES_PER_SLICE)) for n in cores]


def _apportion(weights: Sequence[int], total: int) -> list[int]:
    """Divide `total` in proportion to `weights`, by largest remainder; the first one wins ties."""
    exact = [weight * total / sum(weights) for weight in weights]
    shares = [floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _deal(cores: Sequence[int], count: int, threads: int | None) -> list[tuple[int, ...]]:
    """Cut a node's cores into `count` neighbouring groups; they overlap when there are too few."""
    groups: list[tuple[int, ...]] = []
    for index in range(count):
        if threads is None and count <= len(cores):
            first = index * len(cores) // count
            group = cores[first : (index + 1) * len(cores) // count]
        else:
            size = threads or 1
            group = [cores[(index * size + offset) % len(cores)] for offset in range(size)]
        groups.append(tuple(sorted(group)))
    return groups


def _arena_bytes(machine: Machine, slices: int, kv_bytes: int | None) -> int:
    if kv_bytes is None:
        fair = int(machine.memory_available_bytes * KV_MEMORY_SHARE) // slices
        kv_bytes = min(KV_BYTES_MAX, max(KV_BYTES_MIN, fair))
    return kv_bytes // SLAB_BYTES * SLAB_BYTES
