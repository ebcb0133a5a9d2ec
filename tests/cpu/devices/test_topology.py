"""Links between host and GPUs: found once each, and what they share counts once."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from c2cserve.core.machine import Gpu, Link, LinkGroup, Machine
from c2cserve.devices.discover import discover
from c2cserve.devices.topology import find_gpu_nodes, find_links, show_links

GPUS = tuple(
    Gpu(i, f"GPU-{i}", "NVIDIA H200", 1 << 30, readable=tuple(f"GPU-{j}" for j in {0, 1, 2} - {i}))
    for i in range(3)
)
HOST = Link("host", "memory", "cpu", 150e9)
PCIE_5 = 32e9 / 8 * 16 * 128 / 130


class NVMLError(Exception):
    pass


class FakeNvml:
    """GPUs 0 and 1 are behind one switch. GPU 2 is on another node."""

    NVMLError = NVMLError

    def __init__(self, silent: tuple[str, ...] = ()) -> None:
        self.silent = silent
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802 - the binding's names
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid in self.silent:
            raise NVMLError
        return uuid

    def __getattr__(self, name: str) -> Any:
        table: dict[str, Any] = {
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
            "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(
                busId=f"00000000:{handle[-1]}B:00.0"
            ),
            "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: 50 if "GPU-2" in (a, b) else 20,
        }
        return table[name]


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    for number, node in enumerate((0, 0, 1)):
        device = tmp_path / "bus" / "pci" / "devices" / f"0000:{number}b:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return tmp_path


def machine_of(nvml: FakeNvml, sysfs: Path) -> Machine:
    links, groups = find_links(nvml, GPUS, HOST, sys=sysfs)
    return replace(discover(gpus=GPUS), links=(HOST, *links), groups=groups)


def test_what_links_share_counts_once(sysfs: Path) -> None:
    nvml = FakeNvml()
    machine = machine_of(nvml, sysfs)
    assert nvml.open == 0
    assert [(one.id, one.source, one.target) for one in machine.links[1:]] == [
        ("pcie0", "node0", "gpu0"), ("pcie1", "node0", "gpu1"), ("pcie2", "node1", "gpu2"),
    ]  # fmt: skip
    assert machine.groups[0] == LinkGroup("switch0", ("pcie0", "pcie1"), pytest.approx(PCIE_5))
    combined = machine.combined_bytes_per_s
    assert combined(["pcie0"]) == pytest.approx(PCIE_5)
    assert combined(["pcie0", "pcie1"]) == pytest.approx(PCIE_5)
    assert combined(["pcie0", "pcie2"]) == pytest.approx(2 * PCIE_5)
    slow = replace(machine, groups=(*machine.groups[:-1], replace(machine.groups[-1],
                                                                  bytes_per_s=100e9)))  # fmt: skip
    assert slow.combined_bytes_per_s(["pcie0", "pcie1", "pcie2"]) == pytest.approx(100e9)
    with pytest.raises(KeyError):
        combined(["pcie7"])


def test_the_drawing_has_every_gpu_below_its_node(sysfs: Path) -> None:
    lines = show_links(machine_of(FakeNvml(), sysfs)).splitlines()
    assert lines == [
        "host memory; to all GPUs at once 126 GB/s, as the driver describes it",
        "├─ node0",
        "│  ├─ GPU 0: 63, switch0 (63 together); relays for GPU 1, 2",
        "│  └─ GPU 1: 63, switch0 (63 together); relays for GPU 0, 2",
        "└─ node1",
        "   └─ GPU 2: 63; relays for GPU 0, 1",
    ]


def test_what_the_driver_does_not_tell_is_left_out(sysfs: Path) -> None:
    machine = machine_of(FakeNvml(("GPU-0",)), sysfs)
    assert [one.id for one in machine.links[1:]] == ["pcie1", "pcie2"]
    assert [group.id for group in machine.groups] == ["host"]
    assert find_links(None, GPUS, HOST) == ((), ())
    (sysfs / "bus/pci/devices/0000:1b:00.0/numa_node").write_text("-1\n")
    assert machine_of(FakeNvml(), sysfs).links[2].source == "host"


def test_each_gpu_has_a_node_that_the_kernel_tells(sysfs: Path) -> None:
    assert find_gpu_nodes(FakeNvml(), GPUS, sys=sysfs) == {"GPU-0": 0, "GPU-1": 0, "GPU-2": 1}
    assert find_gpu_nodes(FakeNvml(("GPU-1",)), GPUS, sys=sysfs).keys() == {"GPU-0", "GPU-2"}
    assert find_gpu_nodes(FakeNvml(), GPUS, sys=sysfs / "none") == {}
    assert find_gpu_nodes(None, GPUS) == {}
