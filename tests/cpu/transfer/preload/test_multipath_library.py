"""The library that programs preload: its symbols, and programs' copies on an emulated driver."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
from multipath_vllm import SPREAD
from programs import LIBRARY, Programs, Ran

HOOKED = {
    "cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync_v2_ptsz", "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoHAsync_v2_ptsz", "cuMemcpyAsync", "cuMemcpyAsync_ptsz", "cuMemcpyHtoD_v2",
    "cuMemcpyHtoD_v2_ptds", "cuMemcpyDtoH_v2", "cuMemcpyDtoH_v2_ptds", "cuMemcpy", "cuMemcpy_ptds",
    "cuGetProcAddress", "cuGetProcAddress_v2", "cuDevicePrimaryCtxReset",
    "cuDevicePrimaryCtxReset_v2", "cuInit",
    "dlsym", "c2c_multipath_counts",
}  # fmt: skip


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("programs"))


def copies(programs: Programs, words: Sequence[str], **more: str) -> list[str]:
    ran = programs.run("one_copy", words, **more)
    assert ran.returncode == 0, ran
    return ran.lines


def symbols(*options: str) -> list[list[str]]:
    done = subprocess.run(
        ["nm", "-D", *options, str(LIBRARY)], check=True, capture_output=True, text=True, timeout=60
    )
    return [line.split() for line in done.stdout.splitlines()]


# ---- the library --------------------------------------------------------------------------------


def test_it_exports_what_it_hooks_and_no_more() -> None:
    """Any other symbol would stand in front of the program's."""
    assert {words[-1] for words in symbols("--defined-only")} == HOOKED


def test_it_needs_neither_cuda_nor_a_cpp_library() -> None:
    """A C++ library that comes first may be older than the program's own."""
    needed = subprocess.run(
        ["readelf", "-d", str(LIBRARY)], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert "libcuda" not in needed
    assert "libstdc++" not in needed
    weak = {words[-1] for words in symbols("--undefined-only") if words[-2] in "wv"}
    undefined = {words[-1] for words in symbols("--undefined-only")} - weak
    assert not [name for name in undefined if name.startswith(("cu", "_Z"))]


def test_programs_without_cuda_are_as_before() -> None:
    done = subprocess.run(
        ["/bin/ls", "/"], env={"LD_PRELOAD": str(LIBRARY)}, check=True, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout
    assert not done.stderr


# ---- which copies are spread --------------------------------------------------------------------


@pytest.mark.parametrize("what", ["in", "now", "mapped", "odd"])
def test_large_copies_of_pinned_memory_take_several_links(programs: Programs, what: str) -> None:
    """Also into memory that was mapped for one GPU: the neighbour needs no access to it."""
    assert copies(programs, ["in", what])[-1].endswith(f"{what}: 0 relayed")


def test_copies_out_take_several_links(programs: Programs) -> None:
    assert copies(programs, ["out"]) == ["out: 0 0 relayed"]


@pytest.mark.parametrize(
    ("what", "reason", "said"),
    [
        ("pageable", 1, "pageable memory"),
        ("managed", 2, "managed memory"),
        ("device", 3, None),
        ("registered", 5, "pinned memory that a neighbour cannot access"),
        ("captured", 6, None),
        ("elsewhere", 7, "not in the GPU's primary context"),
        ("context", 7, "not in the GPU's primary context"),
        ("reset", 11, "a GPU was reset"),
    ],
)
def test_other_copies_take_the_plain_path_and_that_is_said_once(
    programs: Programs, what: str, reason: int, said: str | None
) -> None:
    ran = programs.run("one_copy", [what, what])
    assert ran.lines == [f"{what}: {reason}"] * 2
    assert ran.said.count("takes one link") == (said is not None)
    assert said is None or said in ran.said


def test_small_copies_are_not_even_counted(programs: Programs) -> None:
    assert copies(programs, ["small"]) == ["small:"]


@pytest.mark.parametrize("variable", ["FAKE_NO_NVLINK", "C2CSERVE_MULTIPATH_NEIGHBOURS"])
def test_without_a_neighbour_the_path_is_plain(programs: Programs, variable: str) -> None:
    """A neighbour without NVLink would take the link that it is to help out."""
    assert copies(programs, ["in"], **{variable: "0"}) == ["in: 8"]


@pytest.mark.parametrize("lacking", ["FAKE_NO_MAPPINGS", "FAKE_NO_ACCESS"])
def test_without_buffers_it_says_so_and_copies_are_plain(programs: Programs, lacking: str) -> None:
    ran = programs.run("one_copy", ["in", "in"], **{lacking: "1"})
    assert ran.lines == ["in: 9", "in: 9"]
    assert ran.said.count("a neighbour does not relay") == 1


@pytest.mark.parametrize("number", [1, 2, 3, 9, 30])
def test_a_part_of_which_a_hop_fails_is_copied_plainly(programs: Programs, number: int) -> None:
    """So is all that comes later: the neighbour is not asked again."""
    ran = programs.run("one_copy", ["in", "out", "in", "out"], FAKE_FAILS=str(number))
    assert not [line for line in ran.lines if "WRONG" in line]
    assert ran.lines[-1] == "out: 9 9"
    assert ran.said.count("a neighbour relays no more") == 1


def test_no_gpu_gets_access_to_what_others_allocate(programs: Programs) -> None:
    """That would make allocations slower. The program sees its own access only: not on, on, on
    already, off, not on."""
    assert copies(programs, ["in", "out", "peers"])[-1] == "705 0 704 0 705 0 peers: 0 relayed"


def test_a_lane_that_is_full_is_waited_for(programs: Programs) -> None:
    """Its copies move, so there will be room. Without that wait, few take several links."""
    words = copies(programs, ["many"])[0].split()
    assert words.count("0") > 30, words


def test_a_call_does_not_wait_for_a_lane_that_may_wait_for_its_caller(programs: Programs) -> None:
    words = copies(programs, ["held"])[0].split()
    assert words.count("0") + words.count("9") == 40
    assert words.count("0") < 30, words


def test_a_forked_child_copies_plainly_and_its_parent_goes_on(programs: Programs) -> None:
    assert copies(programs, ["in", "forked"]) == ["in: 0 relayed", "1 forked: 0 relayed"]


def test_a_program_that_is_killed_is_just_gone(programs: Programs) -> None:
    assert programs.run("one_copy", ["in", "killed"]).returncode == -9


# ---- many at once -------------------------------------------------------------------------------


def ran_twice(
    programs: Programs, how: str, seed: int, operations: int, **more: str
) -> tuple[Ran, Ran]:
    words = [how, str(seed), str(operations)]
    seeds = {"FAKE_SEED": str(seed)}
    plain = programs.run("random_program", words, preloaded=False, **seeds)
    spread = programs.run("random_program", words, **seeds, **more)
    assert plain.returncode == spread.returncode == 0, spread
    return plain, spread


@pytest.mark.parametrize(
    ("how", "operations"), [("linked", 10_000), ("dlsym", 3000), ("proc", 3000)]
)
def test_random_operations_give_the_same_memory(
    programs: Programs, how: str, operations: int
) -> None:
    """However the program finds the driver's functions."""
    plain, spread = ran_twice(programs, how, 1, operations)
    assert spread.lines[0] == plain.lines[0]
    assert int(spread.lines[1]) > 100
    assert plain.lines[1] == "0"


@pytest.mark.parametrize("seed", range(2, 6))
def test_random_operations_of_other_seeds(programs: Programs, seed: int) -> None:
    plain, spread = ran_twice(programs, "linked", seed, 2000)
    assert spread.lines[0] == plain.lines[0]


@pytest.mark.parametrize("number", [50, 200, 600])
def test_random_operations_of_which_hops_fail(programs: Programs, number: int) -> None:
    """Both GPUs are neighbours that break while other copies are under way."""
    plain, spread = ran_twice(programs, "linked", number, 1000, FAKE_FAILS=str(number))
    assert spread.lines[0] == plain.lines[0]
    assert "a neighbour relays no more" in spread.said


def test_sums_are_printed_at_the_end_if_they_are_asked_for(programs: Programs) -> None:
    words = ["in", "in", "pageable", "captured"]
    assert "several links" not in programs.run("one_copy", words).said
    said = programs.run("one_copy", words, C2CSERVE_MULTIPATH_REPORT="1").said
    assert said.count(SPREAD) == 1
    assert "2 copies, 2 MB: over several links (" in said
    assert "1 copies, 1 MB: captured into a graph" in said


def test_cuda_that_is_used_in_another_way_is_said_once(programs: Programs) -> None:
    """The program opens the driver so that its symbols come before all others."""
    ran = programs.run("past_the_library")
    assert ran.returncode == 0
    assert ran.said.count("its calls did not come through this library") == 1
    assert not programs.run("past_the_library", preloaded=False).said


def test_python_finds_the_hooked_functions(programs: Programs) -> None:
    """`ctypes` asks the driver's library for them, and no other library's symbols change."""
    code = (
        "import ctypes, sys\n"
        "def at(library, name):\n"
        "    return ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value\n"
        "names = ['cuMemcpyHtoDAsync_v2', 'cuGetProcAddress_v2', 'cuMemAlloc_v2']\n"
        "print([at('libcuda.so.1', name) == at(None, name) for name in names[:2]])\n"
        "try: at(None, names[2])\n"
        "except AttributeError: print('of the driver alone')\n"
    )
    ran = programs.run(sys.executable, ["-c", code])
    assert ran.lines == ["[True, True]", "of the driver alone"], ran


def test_copies_of_the_runtime_library_that_python_opens(programs: Programs) -> None:
    """As vLLM's sleep mode makes them: blocking, of a kind that the runtime finds out, in memory
    that is mapped for one GPU."""
    code = (
        "import ctypes\n"
        "driver = ctypes.CDLL('libcuda.so.1')\n"
        "runtime = ctypes.CDLL('libcudart.so.13')\n"
        "size, context = 1 << 20, ctypes.c_void_p()\n"
        "assert driver.cuInit(0) == 0\n"
        "assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0\n"
        "assert driver.cuCtxSetCurrent(context) == 0\n"
        "gpu, host, back = (ctypes.c_uint64() for _ in range(3))\n"
        "assert driver.fake_map(ctypes.byref(gpu), ctypes.c_size_t(size), 0) == 0\n"
        "for one in (host, back):\n"
        "    assert driver.cuMemAllocHost_v2(ctypes.byref(one), ctypes.c_size_t(size)) == 0\n"
        "ctypes.memset(host.value, 7, size)\n"
        "for to, at in ((gpu, host), (back, gpu)):\n"
        "    assert runtime.cudaMemcpy(to, at, ctypes.c_size_t(size), 4) == 0\n"
        "print(ctypes.string_at(back.value, size) == bytes([7]) * size)\n"
        "counts = (ctypes.c_int64 * 27)()\n"
        "ctypes.CDLL(None).c2c_multipath_counts(counts)\n"
        "print(counts[0], sum(counts[1:13]))\n"
    )
    ran = programs.run(sys.executable, ["-c", code])
    assert ran.lines == ["True", "2 0"], ran
