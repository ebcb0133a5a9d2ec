"""The NUMA nodes of slices' readers, and so where the pool's segments should lie."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from c2cserve.core.machine import Machine, Slice

UNKNOWN_NODE = -1
"""The node of a GPU that the kernel does not tell."""


def with_nodes(slices: Sequence[Slice], gpu_nodes: Mapping[str, int]) -> tuple[Slice, ...]:
    """Return the slices with the nodes of their GPUs, by the driver's names. CPU slices stay."""
    return tuple(
        one if one.gpu is None else replace(one, numa=gpu_nodes.get(one.gpu.uuid, UNKNOWN_NODE))
        for one in slices
    )


def reader_nodes(machine: Machine, slices: Sequence[Slice]) -> tuple[int, ...]:
    """Return the nodes over which segments are spread: those from which slices read them.

    Any slice may read any model. So segments lie on the one node of all readers, or are
    interleaved over all of their nodes. A reader on an unknown node may be on each. A machine with
    one node has no choice: the result is empty.
    """
    every = tuple(node.id for node in machine.numa)
    if len(every) < 2:
        return ()
    found = {one.numa for one in slices}
    return every if UNKNOWN_NODE in found else tuple(sorted(found))


def show_nodes(machine: Machine, nodes: Sequence[int]) -> str:
    """Return where segments lie, in words."""
    if len(machine.numa) < 2:
        return "one node: all memory is equally near"
    names = ", ".join(map(str, nodes))
    if len(nodes) < 2:
        return f"the pool's segments lie on node {names}, from which all slices read"
    return f"the pool's segments are interleaved over nodes {names}, from which slices read"
