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
    """GPU 0 is an H200 cut into two instances, GPU 1 a whole H200, GPU 2 knows nothing of MIG."""

    NVMLError = NVMLError
    NVMLError_LibraryNotFound = LibraryNotFound
    NVMLError_DriverNotLoaded = DriverNotLoaded
    NVMLError_NotSupported = NotSupported
    NVMLError_NotFound = NotFound
    NVML_DEVICE_MIG_ENABLE = 1

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
            "nvmlDeviceGetHandleByIndex": lambda index: f"gpu{index}",
            "nvmlDeviceGetMigMode": self._mig_mode,
            "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": self._instance,
            "nvmlDeviceGetUUID": lambda handle: f"uuid-{handle}".encode(),
            "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(
                total=(141 << 30) if "mig" not in handle else (18 << 30)
            ),
            "nvmlDeviceGetNumGpuCores": lambda handle: 132 * 128,
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
            "nvmlDeviceGetAttributes": lambda handle: SimpleNamespace(multiprocessorCount=16),
        }
        return table[name]

    def _mig_mode(self, handle: str) -> tuple[int, int]:
        if handle == "gpu2":
            raise NotSupported
        return (1, 1) if handle == "gpu0" else (0, 0)

    def _instance(self, handle: str, slot: int) -> str:
        if slot not in (0, 3):
            raise NotFound
        return f"{handle}-mig{slot}"


def test_mig_instances_replace_their_gpu() -> None:
    nvml = FakeNvml()
    assert find_gpus(nvml) == (
        Gpu(0, "uuid-gpu0-mig0", "NVIDIA H200", 18 << 30, sms=16, mig=True),
        Gpu(0, "uuid-gpu0-mig3", "NVIDIA H200", 18 << 30, sms=16, mig=True),
        Gpu(1, "uuid-gpu1", "NVIDIA H200", 141 << 30, sms=132),
        Gpu(2, "uuid-gpu2", "NVIDIA H200", 141 << 30, sms=132),
    )
    assert nvml.open == 0, "NVML is closed again"


@pytest.mark.parametrize("fault", [LibraryNotFound(), DriverNotLoaded()])
def test_no_driver_is_no_gpus(fault: NVMLError) -> None:
    assert find_gpus(FakeNvml(fault)) == ()
    assert find_gpus(None) == ()


def test_a_driver_that_answers_with_an_error_is_a_problem() -> None:
    with pytest.raises(GpuProblem, match="version mismatch"):
        find_gpus(FakeNvml(NVMLError("driver/library version mismatch")))
