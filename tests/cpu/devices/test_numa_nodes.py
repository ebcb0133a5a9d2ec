"""From which NUMA nodes slices read, on recorded machines."""

from dataclasses import replace
from pathlib import Path

from device_trees import xeon

from c2cserve.core.machine import Gpu, GpuShare, Machine, Slice
from c2cserve.devices.discover import discover
from c2cserve.devices.numa import UNKNOWN_NODE, reader_nodes, show_nodes, with_nodes
from c2cserve.devices.slices import plan_slices

GPUS = tuple(Gpu(n, f"GPU-{n}", "NVIDIA H200", 141 << 30, 132) for n in range(2))
SLICES = tuple(
    Slice(f"gpu{n}", "gpu", gpu=GpuShare(gpu.uuid, 132), hbm_bytes=1 << 30)
    for n, gpu in enumerate(GPUS)
)


def two_sockets(root: Path) -> Machine:
    proc, sys = xeon(root)
    return discover(proc=proc, sys=sys, cpus=range(96), gpus=GPUS)


def test_gpus_on_both_sockets_read_what_is_interleaved(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path)
    slices = with_nodes(SLICES, {"GPU-0": 0, "GPU-1": 1})
    assert [one.numa for one in slices] == [0, 1]
    assert reader_nodes(machine, slices) == (0, 1)
    assert "interleaved over nodes 0, 1" in show_nodes(machine, (0, 1))


def test_readers_on_one_socket_have_all_segments_there(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path)
    slices = with_nodes(SLICES, {"GPU-0": 1, "GPU-1": 1})
    assert reader_nodes(machine, slices) == (1,)
    assert "on node 1" in show_nodes(machine, (1,))


def test_a_gpu_of_which_nothing_is_known_may_be_anywhere(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path)
    slices = with_nodes(SLICES, {"GPU-0": 1})
    assert slices[1].numa == UNKNOWN_NODE
    assert reader_nodes(machine, slices) == (0, 1)


def test_cpu_slices_of_both_sockets_read_from_both(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path)
    slices = with_nodes(plan_slices(machine), {})
    assert reader_nodes(machine, slices) == (0, 1)
    assert reader_nodes(machine, [one for one in slices if one.numa == 1]) == (1,)


def test_one_node_leaves_no_choice(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path)
    machine = replace(machine, numa=machine.numa[:1])
    assert reader_nodes(machine, with_nodes(SLICES, {})) == ()
    assert show_nodes(machine, ()) == "one node: all memory is equally near"
