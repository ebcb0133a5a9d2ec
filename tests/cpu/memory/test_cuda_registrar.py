"""What is asked of CUDA's runtime to register memory, and what its answers lead to."""

from types import SimpleNamespace

import pytest

from c2cserve.memory import pinning
from c2cserve.memory.pinning import CudaRegistrar, PinningError


class Code(int):
    """A code of CUDA's, with its name."""

    @property
    def name(self) -> str:
        return "cudaErrorMemoryAllocation" if self else "cudaSuccess"


DONE, REFUSED = Code(0), Code(2)
PORTABLE, MAPPED, READ_ONLY = 1, 2, 8


class Runtime:
    """Stands in for `cuda.bindings.runtime`."""

    def __init__(self) -> None:
        self.read_only = True
        """Memory registers with the flag for read-only mappings alone."""
        self.shift = 0
        """By how much the GPU's address is another one."""
        self.refuses = False
        self.device: int | None = None
        self.registered: dict[int, tuple[int, int]] = {}
        self.last = DONE
        self.module = SimpleNamespace(
            cudaHostRegisterPortable=PORTABLE, cudaHostRegisterMapped=MAPPED,
            cudaHostRegisterReadOnly=READ_ONLY, cudaSetDevice=self._set_device,
            cudaHostRegister=self._register, cudaHostUnregister=self._unregister,
            cudaHostGetDevicePointer=lambda address, flags: (DONE, address + self.shift),
            cudaGetLastError=self._last_error,
        )  # fmt: skip

    def _set_device(self, device: int) -> tuple[Code]:
        self.device = device
        return (DONE,)

    def _register(self, address: int, size: int, flags: int) -> tuple[Code]:
        if self.refuses or (self.read_only and not flags & READ_ONLY):
            self.last = REFUSED
            return (REFUSED,)
        self.registered[address] = size, flags
        return (DONE,)

    def _unregister(self, address: int) -> tuple[Code]:
        del self.registered[address]
        return (DONE,)

    def _last_error(self) -> tuple[Code]:
        last, self.last = self.last, DONE
        return (last,)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(pinning, "import_module", lambda name: made.module)
    return made


@pytest.mark.parametrize("read_only", [True, False])
def test_memory_is_registered_for_all_gpus_and_read_only_if_it_must_be(
    runtime: Runtime, read_only: bool
) -> None:
    runtime.read_only = read_only
    registrar = CudaRegistrar(3)
    registrar.register(1 << 26, 4096)
    assert runtime.registered == {
        1 << 26: (4096, PORTABLE | MAPPED | (READ_ONLY if read_only else 0))
    }
    assert runtime.device == 3
    assert runtime.last == DONE, "no later call reports the first answer"
    registrar.unregister(1 << 26)
    assert not runtime.registered


def test_a_refusal_names_the_size_and_cudas_error(runtime: Runtime) -> None:
    runtime.refuses = True
    with pytest.raises(PinningError, match="of 8192 bytes: cudaErrorMemoryAllocation"):
        CudaRegistrar().register(1 << 26, 8192)
    assert runtime.device is None
    assert runtime.last == DONE


def test_a_gpu_that_sees_the_memory_elsewhere_cannot_use_it(runtime: Runtime) -> None:
    runtime.shift = 4096
    with pytest.raises(PinningError, match="another address"):
        CudaRegistrar().register(1 << 26, 4096)
    assert not runtime.registered
