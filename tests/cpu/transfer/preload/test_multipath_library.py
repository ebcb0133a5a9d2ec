"""The library that programs preload: its symbols, and programs' copies on an emulated driver."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
from programs import LIBRARY, Programs, Ran

HOOKED = {
    "cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync_v2_ptsz", "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoHAsync_v2_ptsz", "cuMemcpyAsync", "cuMemcpyAsync_ptsz", "cuMemcpyHtoD_v2",
    "cuMemcpyHtoD_v2_ptds", "cuMemcpyDtoH_v2", "cuMemcpyDtoH_v2_ptds", "cuMemcpy", "cuMemcpy_ptds",
    "cuGetProcAddress", "cuGetProcAddress_v2", "cuDevicePrimaryCtxReset",
    "cuDevicePrimaryCtxReset_v2", "cuInit",
    "cuCtxEnablePeerAccess", "cuCtxDisablePeerAccess", "dlsym", "c2c_multipath_counts",
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


@pytest.mark.parametrize("what", ["in", "now", "mapped", "peers"])
def test_large_copies_of_pinned_memory_take_several_links(programs: Programs, what: str) -> None:
    """Also into memory that was mapped for one GPU: the neighbour gets access."""
    assert copies(programs, ["in", what])[-1].endswith(f"{what}: 0 relayed")


def test_copies_out_take_several_links(programs: Programs) -> None:
    assert copies(programs, ["out"]) == ["out: 0 0 relayed"]


@pytest.mark.parametrize(
    ("what", "reason", "said"),
    [
        ("pageable", 1, "pageable memory"),
        ("managed", 2, "managed memory"),
        ("device", 3, None),
        ("registered", 6, "pinned memory that a neighbour cannot access"),
        ("captured", 8, None),
        ("elsewhere", 9, "not in the GPU's primary context"),
        ("context", 9, "not in the GPU's primary context"),
        ("reset", 13, "a GPU was reset"),
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
    assert copies(programs, ["in"], **{variable: "0"}) == ["in: 10"]


def test_without_its_kernel_it_says_so_and_copies_are_plain(programs: Programs) -> None:
    ran = programs.run("one_copy", ["in", "in"], C2CSERVE_MULTIPATH_RELAY="/no/such/file")
    assert ran.lines == ["in: 14", "in: 14"]
    assert "/no/such/file cannot be read" in ran.said


def test_what_the_program_sees_of_peer_access_is_its_own(programs: Programs) -> None:
    """Not on, on, on already, off, not on: while the library's relays use it."""
    assert copies(programs, ["in", "peers"])[-1] == "705 0 704 0 705 peers: 0 relayed"


def test_a_forked_child_copies_plainly_and_its_parent_goes_on(programs: Programs) -> None:
    assert copies(programs, ["in", "forked"]) == ["in: 0 relayed", "1 forked: 0 relayed"]


def test_a_program_that_is_killed_is_just_gone(programs: Programs) -> None:
    assert programs.run("one_copy", ["in", "killed"]).returncode == -9


# ---- many at once -------------------------------------------------------------------------------


def ran_twice(programs: Programs, how: str, seed: int, operations: int) -> tuple[Ran, Ran]:
    words = [how, str(seed), str(operations)]
    seeds = {"FAKE_SEED": str(seed)}
    plain = programs.run("random_program", words, preloaded=False, **seeds)
    spread = programs.run("random_program", words, **seeds)
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


def test_sums_are_printed_at_the_end_if_they_are_asked_for(programs: Programs) -> None:
    words = ["in", "in", "pageable", "captured"]
    assert "over several links" not in programs.run("one_copy", words).said
    said = programs.run("one_copy", words, C2CSERVE_MULTIPATH_REPORT="1").said
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
