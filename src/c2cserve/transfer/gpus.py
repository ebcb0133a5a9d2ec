"""The transfer engine over the links of this process's GPUs (`transfer/native/cuda_links.h`)."""

import atexit
import contextlib
import ctypes
import logging
from collections.abc import Generator, Sequence
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

from c2cserve.core.machine import ProfileChoice
from c2cserve.kernels.gpu.aot.compiler import cubin_path, default_folder
from c2cserve.kernels.gpu.aot.repository import KernelMissingError
from c2cserve.kernels.gpu.aot.variants import RELAY
from c2cserve.kernels.gpu.driver import CudaError, checked, cu
from c2cserve.kernels.gpu.host_borders import BORDER_BYTES
from c2cserve.transfer.engine import RelayServer, TransferEngine
from c2cserve.transfer.library import Result, library, machine_of, relay_view_of, view_of
from c2cserve.transfer.moves import Port, ports_of
from c2cserve.transfer.path_profile import (
    PathProfile,
    PathProfileError,
    PathsMissing,
    load_paths,
)
from c2cserve.transfer.relay_channel import GpuMemory
from c2cserve.transfer.settings import RelayShape, Settings

log = logging.getLogger(__name__)

_DRIVER = "libcuda.so.1"
_HANDLE_BYTES = 64
_ENABLED_ALREADY = 704
"""CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, which leaves nothing behind in the driver's API."""


_SERVING = Settings(alone_bytes=16 << 20)
"""A step's own small copies to the GPU may have to wait for one of these: 0.3 ms over PCIe 5."""


@cache
def engine_of(
    gpus: tuple[int, ...], neighbours: tuple[int, ...] = (), profile: ProfileChoice = "assumed"
) -> TransferEngine:
    """Return the process's engine for what runs on the first of these GPUs, by CUDA's numbers. The
    others lend it their links, and it does not relay for them. `neighbours` are GPUs of other
    processes, which may relay once they are connected. With `profile` "measured", transfers are
    cut by this machine's figures, if it has any.

    The engine stops at the end of the process. Raises as `open_engine` does.
    """
    settings, own = _SERVING, None
    if profile == "measured" and (paths := _measured_paths(gpus[0])) is not None:
        settings, own = paths.tuned(_SERVING), paths.own_shape
    engine = open_engine(gpus, settings, relayed=gpus[:1], neighbours=neighbours, own=own)
    atexit.register(engine.stop)
    return engine


def _measured_paths(gpu: int) -> PathProfile | None:
    try:
        return load_paths(torch.cuda.get_device_name(gpu))
    except PathsMissing as error:
        log.info("transfers are not tuned: %s", error)
    except PathProfileError as error:
        log.warning("transfers are not tuned: %s", error)
    return None


def open_engine(
    gpus: Sequence[int], settings: Settings | None = None, *, relayed: Sequence[int] | None = None,
    neighbours: Sequence[int] = (), relay: RelayShape | None = None, own: RelayShape | None = None,
    folder: Path | None = None,
) -> TransferEngine:  # fmt: skip
    """Return an engine over the links of these GPUs, by CUDA's numbers.

    GPUs without access to each other's memory do not relay for each other. `relayed` are those that
    others relay for, all by default. `own` is the shape of the kernel that carries small segments,
    if the settings have it. Raises `CudaError`, `LinkError`, `KernelsMissing`, and
    `KernelMissingError` if the relay kernel is needed and not built.
    """
    settings = settings or Settings()
    reaches = [pair for pair in permutations(gpus, 2) if _enable_peer(*pair)]
    ports, relays = ports_of(gpus, reaches, relayed, neighbours)
    contexts = [
        None if port.carrier in neighbours else int(context_of(port.carrier)) for port in ports
    ]
    needs_kernel = reaches or settings.has_kernel
    cubin = _relay_cubin(folder or default_folder()) if needs_kernel else None
    return open_on(ports, relays, contexts, cubin, settings, relay, own)


def open_on(
    ports: Sequence[Port], relays: Sequence[tuple[int, int]], contexts: Sequence[int | None],
    cubin: bytes | None, settings: Settings, relay: RelayShape | None = None,
    own: RelayShape | None = None, *, driver: str = _DRIVER,
) -> TransferEngine:  # fmt: skip
    """Return an engine over these ports, in contexts of the GPUs that carry them. Ports without a
    context are links of other processes.

    `driver` is CUDA's library, or a test's. Raises `LinkError`.
    """

    def open_native() -> Result:
        places = (ctypes.c_void_p * len(contexts))(*contexts)
        return library().c2c_transfers_open(
            machine_of(ports, relays), view_of(settings), driver.encode(), places, cubin,
            relay_view_of(relay or RelayShape(), RELAY.threads),
            relay_view_of(own or RelayShape(), RELAY.threads),
        )  # fmt: skip

    return TransferEngine(ports, open_native)


def serve_relays(engine: TransferEngine, gpu: int, channel: int) -> RelayServer:
    """Relay over a GPU's link what another process submits to the memory at `channel`.

    `engine` has this process's own transfers, which come first. Raises `LinkError` and `CudaError`.
    """
    return serve_on(engine, int(context_of(gpu)), channel)


def serve_on(
    engine: TransferEngine, context: int, channel: int, *, driver: str = _DRIVER,
    border_bytes: int = BORDER_BYTES,
) -> RelayServer:  # fmt: skip
    """`serve_relays` in a context. `border_bytes`: see `Settings`. Raises `LinkError`."""
    return engine.open_server(
        lambda native: library().c2c_relays_open(
            native, driver.encode(), context, channel, border_bytes
        )
    )


def export_memory(address: int, size: int) -> GpuMemory:
    """Return what another process opens memory of this one's GPU with. Raises `CudaError` for
    memory that cannot be shared so."""
    base, _ = checked("cuMemGetAddressRange", cu.cuMemGetAddressRange(address))
    handle = checked("cuIpcGetMemHandle", cu.cuIpcGetMemHandle(base))
    raw = ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)
    return GpuMemory(raw, address - int(base), size)


def import_memory(gpu: int, memory: GpuMemory) -> int:
    """Open memory of another process's GPU for copies by `gpu`. Return the address of the
    allocation, for `forget_memory`. Raises `CudaError`."""
    if len(memory.handle) != _HANDLE_BYTES:
        raise CudaError(f"a handle of memory has {_HANDLE_BYTES} bytes")
    handle = cu.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), memory.handle, _HANDLE_BYTES)
    lazy = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    with use(gpu):
        return int(checked("cuIpcOpenMemHandle", cu.cuIpcOpenMemHandle(handle, int(lazy))))


def forget_memory(gpu: int, address: int) -> None:
    """Close what `import_memory` has returned. No copy uses it. Raises `CudaError`."""
    with use(gpu):
        checked("cuIpcCloseMemHandle", cu.cuIpcCloseMemHandle(address))


def _relay_cubin(folder: Path) -> bytes:
    path = cubin_path(folder, RELAY)
    if not path.exists():
        raise KernelMissingError(RELAY, folder)
    return path.read_bytes()


@cache
def context_of(gpu: int) -> Any:
    """Return the primary context of a GPU, by CUDA's number. It is never given back."""
    torch.cuda.init()
    checked("cuInit", cu.cuInit(0))
    device = checked("cuDeviceGet", cu.cuDeviceGet(gpu))
    return checked("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(device))


@contextlib.contextmanager
def use(gpu: int) -> Generator[None]:
    """Make a GPU's context this thread's current one meanwhile. Raises `CudaError`."""
    checked("cuCtxPushCurrent", cu.cuCtxPushCurrent(context_of(gpu)))
    try:
        yield
    finally:
        checked("cuCtxPopCurrent", cu.cuCtxPopCurrent())


def _enable_peer(gpu: int, other: int) -> bool:
    """Let `gpu` access the memory of `other`. Return False if it cannot. Raises `CudaError`."""
    theirs = context_of(other)
    with use(gpu):
        devices = [checked("cuDeviceGet", cu.cuDeviceGet(number)) for number in (gpu, other)]
        if not checked("cuDeviceCanAccessPeer", cu.cuDeviceCanAccessPeer(*devices)):
            return False
        result = cu.cuCtxEnablePeerAccess(theirs, 0)
        if int(result[0]) != _ENABLED_ALREADY:
            checked("cuCtxEnablePeerAccess", result)
    return True
