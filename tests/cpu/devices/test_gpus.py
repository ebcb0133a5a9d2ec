"""GPU discovery against a stand-in of the NVML binding."""

from types import SimpleNamespace
from typing import Any

import pytest

from c2cserve.core.machine import Gpu
from c2cserve.devices.gpus import GpuProblem, find_gpus


class NVMLError(Exception):
    pass


class LibraryNotFound(NVMLError):
    pass


class DriverNotLoaded(NVMLError):
    pass


class NotSupported(NVMLError):
    pass


class NotFound(NVMLError):
    pass


class FakeNvml:
    """Three GPUs. GPU 0 is an H200 with a 3g.71gb and a 1g.18gb instance (sizes of `nvidia-smi mig
    -lgip`). GPU 1 is a whole H200 with some memory in use. GPU 2 has no MIG. GPU 1 reads GPU 2's
    memory; GPU 2 does not answer that question."""

    NVMLError = NVMLError
    NVMLError_LibraryNotFound = LibraryNotFound
    NVMLError_DriverNotLoaded = DriverNotLoaded
    NVMLError_NotSupported = NotSupported
    NVMLError_NotFound = NotFound
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_P2P_CAPS_INDEX_READ = (0,)  # as pynvml has it
    NVML_P2P_STATUS_OK = 0

    def __init__(self, fault: NVMLError | None = None) -> None:
        self.fault = fault
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802 - the binding's names
        if self.fault is not None:
            raise self.fault
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def __getattr__(self, name: str) -> Any:
        table: dict[str, Any] = {
            "nvmlDeviceGetCount": lambda: 3,
            "nvmlDeviceGetHandleByIndex": lambda index: f"GPU-{index}",
            "nvmlDeviceGetMigMode": self._mig_mode,
            "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": self._instance,
            "nvmlDeviceGetUUID": lambda handle: f"{handle}-uuid".encode(),
            "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(
                total=MEMORY[handle][0], free=MEMORY[handle][1]
            ),
            "nvmlDeviceGetP2PStatus": self._peer_status,
            "nvmlDeviceGetNumGpuCores": lambda handle: 132 * 128,
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
            "nvmlDeviceGetAttributes": lambda handle: SimpleNamespace(
                multiprocessorCount=60 if handle == "MIG-0" else 16
            ),
        }
        return table[name]

    def _mig_mode(self, handle: str) -> tuple[int, int]:
        if handle == "GPU-2":
            raise NotSupported
        return (1, 1) if handle == "GPU-0" else (0, 0)

    def _peer_status(self, handle: str, other: str, what: int) -> int:
        if handle == "GPU-2":
            raise NotSupported
        return 0 if other == "GPU-2" else 1

    def _instance(self, handle: str, slot: int) -> str:
        if slot not in (0, 3):
            raise NotFound
        return f"MIG-{slot}"


MIB = 1 << 20
WHOLE = 143771 * MIB
MEMORY = {
    "MIG-0": (71168 * MIB, 71130 * MIB),
    "MIG-3": (16384 * MIB, 16370 * MIB),
    "GPU-1": (WHOLE, 101000 * MIB),
    "GPU-2": (WHOLE, 143150 * MIB),
}


def test_mig_instances_replace_their_gpu() -> None:
    nvml = FakeNvml()
    assert find_gpus(nvml) == (
        Gpu(
            0, "MIG-0-uuid", "NVIDIA H200", 71168 * MIB, 60, mig=True, memory_free_bytes=71130 * MIB
        ),
        Gpu(
            0, "MIG-3-uuid", "NVIDIA H200", 16384 * MIB, 16, mig=True, memory_free_bytes=16370 * MIB
        ),
        Gpu(
            1,
            "GPU-1-uuid",
            "NVIDIA H200",
            WHOLE,
            132,
            memory_free_bytes=101000 * MIB,
            readable=("GPU-2-uuid",),
        ),
        Gpu(2, "GPU-2-uuid", "NVIDIA H200", WHOLE, 132, memory_free_bytes=143150 * MIB),
    )
    assert nvml.open == 0, "NVML is closed again"


@pytest.mark.parametrize("fault", [LibraryNotFound(), DriverNotLoaded()])
def test_no_driver_is_no_gpus(fault: NVMLError) -> None:
    assert find_gpus(FakeNvml(fault)) == ()
    assert find_gpus(None) == ()


def test_a_driver_that_answers_with_an_error_is_a_problem() -> None:
    with pytest.raises(GpuProblem, match="version mismatch"):
        find_gpus(FakeNvml(NVMLError("driver/library version mismatch")))
