"""When a kernel is launched by what it compiled to, and when Triton is asked: on a made-up JIT."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from interpreted import DEVICE

from c2cserve.kernels.gpu import launcher as launcher_module
from c2cserve.kernels.gpu.launcher import Launcher
from c2cserve.kernels.gpu.programmatic_launch import PDL_OPTIONS


@dataclass
class At:
    """A tensor, as far as launches look at one."""

    pointer: int
    device: int = 0

    def data_ptr(self) -> int:
        return self.pointer

    def get_device(self) -> int:
        return self.device


@dataclass
class Parameter:
    name: str
    do_not_specialize: bool = False


@dataclass
class Kernel:
    """(x, out, width, count, eps, BLOCK, PDL): width is specialised on, count is not."""

    asked: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    ran: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    function = "function"
    packed_metadata = "metadata"
    arg_names = ("x", "out", "width", "count", "eps", "BLOCK", "PDL")
    params = (
        Parameter("x"), Parameter("out"), Parameter("width"), Parameter("count", True),
        Parameter("eps"),
    )  # fmt: skip

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, **options: Any) -> "Kernel":
            self.asked.append((grid, arguments, options))
            return self

        return launch

    def run(self, *arguments: Any) -> None:
        self.ran.append(arguments)


def constants(width: int) -> dict[str, Any]:
    return {"BLOCK": 2 * width, "num_warps": 4}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launcher_module, "current_stream", lambda device: f"stream of {device}")
    return Kernel()


GRID = (5, 1, 1)


def test_triton_is_asked_once_for_a_key(kernel: Kernel) -> None:
    launch = Launcher(kernel, constants)
    launch(GRID, (At(16), At(32)), (64, 7, 0.5), (64,))
    assert len(kernel.asked) == 1
    grid, arguments, options = kernel.asked[0]
    assert (grid, arguments[2:]) == (GRID, (64, 7, 0.5))
    assert options == {"BLOCK": 128, "num_warps": 4, **PDL_OPTIONS}
    launch((6, 2, 1), (At(48), At(1024)), (64, 9, 0.25), (64,))
    assert len(kernel.asked) == 1
    assert kernel.ran == [
        (6, 2, 1, "stream of 0", "function", "metadata", None, None, None, 48, 1024, 64, 9, 0.25,
         128, PDL_OPTIONS["PDL"])
    ]  # fmt: skip


class CudaLauncher:
    """Triton's own, of a kernel that needs scratch memory or not."""

    launch_cooperative_grid, launch_pdl, profile_scratch_size = False, True, 0

    def __init__(self, scratch_bytes: int) -> None:
        self.global_scratch_size = scratch_bytes
        self.called: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.called.append(arguments)

    def launch(self, *arguments: Any) -> None:
        self.launched.append(arguments)


@pytest.mark.parametrize("scratch_bytes", [0, 512])
def test_kernels_without_scratch_memory_are_launched_by_the_function_in_c(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, scratch_bytes: int
) -> None:
    run = CudaLauncher(scratch_bytes)
    monkeypatch.setattr(kernel, "run", run)
    launch = Launcher(kernel, constants)
    for _ in range(2):
        launch(GRID, (At(16), At(32)), (64, 7, 0.5), (64,))
    own = (16, 32, 64, 7, 0.5, 128, PDL_OPTIONS["PDL"])
    described = ("metadata", None, None, None)
    if scratch_bytes:
        assert run.called == [(*GRID, "stream of 0", "function", *described, *own)]
    else:
        options = (False, True, None, None)
        assert run.launched == [(*GRID, "stream of 0", "function", *options, *described, *own)]
    assert len(run.called) + len(run.launched) == 1


def test_triton_is_asked_for_another_key_or_gpu_or_an_odd_address(kernel: Kernel) -> None:
    launch = Launcher(kernel, constants)
    launch(GRID, (At(16), At(24)), (64, 7, 0.5), (64,))
    launch(GRID, (At(16), At(32)), (64, 7, 0.5), (64,))  # the first was compiled for odd ones
    launch(GRID, (At(16), At(40)), (64, 7, 0.5), (64,))
    launch(GRID, (At(16), At(32)), (65, 7, 0.5), (65,))
    launch(GRID, (At(16, 1), At(32, 1)), (64, 7, 0.5), (64,))
    assert (len(kernel.asked), len(kernel.ran)) == (5, 0)
    for device, width in ((0, 64), (0, 65), (1, 64)):
        launch(GRID, (At(16, device), At(32, device)), (width, 7, 0.5), (width,))
    assert (len(kernel.asked), len(kernel.ran)) == (5, 3)


def test_a_key_that_lacks_a_number_is_found_at_once(kernel: Kernel) -> None:
    launch = Launcher(kernel, lambda *_: constants(64))
    with pytest.raises(AssertionError, match="width = 64"):
        launch(GRID, (At(16), At(32)), (64, 7, 0.5), ("bfloat16",))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="about kernels that are interpreted")
def test_interpreted_kernels_are_left_to_triton(kernel: Kernel) -> None:
    launch = Launcher(kernel, constants)
    for _ in range(2):
        launch(GRID, (At(16, -1), At(32, -1)), (64, 7, 0.5), (64,))
    assert (len(kernel.asked), len(kernel.ran)) == (2, 0)
