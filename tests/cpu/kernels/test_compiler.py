"""The ahead-of-time build: every kernel compiles and fits, and only what is right is ever found."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from c2cserve.kernels.gpu.aot import compiler
from c2cserve.kernels.gpu.aot.compiler import (
    BuildError,
    Report,
    build,
    check,
    clean,
    key,
    parse_report,
)
from c2cserve.kernels.gpu.aot.repository import KernelMissingError, Repository
from c2cserve.kernels.gpu.aot.variants import RELAY, Source, Variant
from c2cserve.kernels.gpu.gemm.dataflows.table import VARIANTS

FakeNvcc = Callable[..., Path]

CACHE = Path(__file__).parents[3] / "build" / "kernels"
"""Cubins live as long as the checkout (`make clean` removes them): they are keyed by their sources,
so a run after the first compiles what has changed and nothing else."""
DIRECT = Variant("direct", "bfloat16", 64)
FEW = VARIANTS[:6]
WHOLE = b"half of a kernel"
BUILDER = """
import sys
from pathlib import Path
from c2cserve.kernels.gpu.aot.compiler import build
from c2cserve.kernels.gpu.gemm.dataflows.table import VARIANTS
build(VARIANTS[: int(sys.argv[2])], Path(sys.argv[1]), force=True)
"""


@pytest.fixture(autouse=True)
def plain_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """When these tests run under a sanitizer, nvcc does not: it would not survive it."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the device code that is built instead of ours."""
    copied = shutil.copytree(compiler.SOURCES, tmp_path / "cuda")
    monkeypatch.setattr(compiler, "SOURCES", copied)
    return copied


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "// edited\n")


def builder(folder: Path, count: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", BUILDER, str(folder), str(count)]
    return subprocess.Popen(command, start_new_session=True)


# The device code itself


def largest(variants: list[Variant]) -> list[Variant]:
    """Of every source, and every option that has code of its own: what needs the most registers."""
    found: dict[object, list[Variant]] = {}
    for one in variants:
        if one.dtype == "bfloat16":
            found.setdefault((one.source, one.tee, one.cluster > 1), []).append(one)
    return [max(of, key=lambda v: (v.bx, v.kp)) for of in found.values()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_variants_compile_and_none_uses_local_memory(which: str) -> None:
    """Fails, and says why, where there is no nvcc: this is what keeps the device code honest."""
    everyone = list(VARIANTS)
    variants = everyone if which == "all" else largest(everyone)
    assert {one.source for one in variants} == {one.source for one in everyone}
    build(variants, CACHE)
    if which == "all":
        clean([*variants, RELAY], CACHE)
    assert check(variants, CACHE) == []


@pytest.mark.timeout(900)
def test_the_relay_compiles_and_uses_no_local_memory() -> None:
    build([RELAY], CACHE)
    assert check([RELAY], CACHE) == []


@pytest.mark.parametrize(
    "variant",
    [
        Variant("direct", "bfloat16", 256),
        Variant("split", "bfloat16", 64, 2),
        Variant("grouped", "bfloat16", 256),
        Variant("ring", "bfloat16", 256),
        Variant("hybrid", "bfloat16", 256, kp=256, partial_bytes=4),
    ],
    ids=lambda variant: variant.name,
)
def test_more_stages_than_shared_memory_holds_do_not_compile(
    variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `variants.py` works out is held against the device code's own sizes."""
    monkeypatch.setattr(Variant, "stages", variant.stages + 1)
    with pytest.raises(BuildError, match="static assertion failed"):
        compiler.compile_variant(variant, tmp_path, compiler.find_nvcc())
    assert not list(tmp_path.iterdir())


# Keys


def test_keys_tell_all_variants_apart() -> None:
    assert len({key(variant) for variant in VARIANTS}) == len(VARIANTS)


@pytest.mark.parametrize("source", ["direct", "split", "grouped", "ring", "hybrid"])
def test_a_key_covers_all_that_is_included(source: Source, sources: Path) -> None:
    variant = next(one for one in VARIANTS if one.source == source)
    seen = {key(variant)}
    for name in (f"{source}.cu", "pipeline.cuh", "wgmma.cuh", "ptx.cuh"):
        edit(sources / name)
        assert key(variant) not in seen, f"{name} was edited"
        seen.add(key(variant))
    others = {path.stem for path in sources.glob("*.cu")} - {source}
    before = key(variant)
    for other in others:
        edit(sources / f"{other}.cu")
    assert key(variant) == before


def test_a_key_covers_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(DIRECT)
    monkeypatch.setattr(compiler, "_FLAGS", (*compiler._FLAGS, "-lineinfo"))
    assert key(DIRECT) != before


def test_an_include_that_is_not_there_is_named(sources: Path) -> None:
    (sources / "ptx.cuh").unlink()
    with pytest.raises(BuildError, match=r"direct\.cu needs .*/ptx\.cuh, which is not there"):
        key(DIRECT)


# What a folder has


def test_a_second_build_compiles_nothing(fake_nvcc: FakeNvcc, tmp_path: Path) -> None:
    log = fake_nvcc()
    heard: list[Variant] = []
    made = build(FEW, tmp_path, built=lambda variant, _: heard.append(variant))
    assert (set(made), set(heard)) == (set(FEW), set(FEW))
    compiled = log.read_text().splitlines()
    assert len(compiled) == len(FEW)
    assert any("-DBX=16" in line and "direct.cu" in line for line in compiled)
    assert build(FEW, tmp_path) == []
    assert log.read_text().splitlines() == compiled
    assert build(FEW, tmp_path, force=True) == list(FEW)


def test_cubins_can_be_read_by_others(fake_nvcc: FakeNvcc, tmp_path: Path) -> None:
    """An image is built by root and served from by somebody else."""
    fake_nvcc()
    build([DIRECT], tmp_path / "kernels")
    umask = os.umask(0)
    os.umask(umask)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "kernels").iterdir()}
    assert modes == {0o666 & ~umask}


def test_a_stale_cubin_is_not_used(fake_nvcc: FakeNvcc, sources: Path, tmp_path: Path) -> None:
    fake_nvcc()
    folder = tmp_path / "kernels"
    build(FEW, folder)
    assert {compiler.state(folder, variant) for variant in FEW} == {"built"}
    edit(sources / "ptx.cuh")
    assert {compiler.state(folder, variant) for variant in FEW} == {"stale"}
    assert check(FEW[:1], folder) == [f"{FEW[0].name} is stale: its sources have changed since"]
    with pytest.raises(KernelMissingError):
        Repository(0, folder).kernel(FEW[0])
    assert build(FEW, folder) == list(FEW)
    assert check(FEW, folder) == []
    assert clean(FEW, folder) == 2 * len(FEW), "cubins and reports of the sources as they were"
    assert check(FEW, folder) == []
    assert clean(FEW, folder) == 0


def test_a_cubin_whose_report_is_gone_is_built_again(fake_nvcc: FakeNvcc, tmp_path: Path) -> None:
    fake_nvcc()
    build(FEW, tmp_path)
    compiler.report_path(tmp_path, FEW[0]).unlink()
    compiler.report_path(tmp_path, FEW[1]).write_text('{"registers": 1}')
    assert len(check(FEW, tmp_path)) == 2
    assert build(FEW, tmp_path) == list(FEW[:2])
    assert check(FEW, tmp_path) == []


def test_a_missing_kernel_is_named_with_what_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KernelMissingError) as missing:
        Repository(0, tmp_path).load(VARIANTS)
    assert str(missing.value) == (
        f"the kernel {VARIANTS[0].name} is not in {tmp_path}:"
        f" run `c2cserve kernels build --folder {tmp_path}`"
    )
    assert missing.value.variant is VARIANTS[0]
    monkeypatch.setenv("C2CSERVE_HOME", str(tmp_path))
    with pytest.raises(KernelMissingError, match=r"run `c2cserve kernels build`$"):
        Repository(0).kernel(DIRECT)


# Races and deaths


def test_builders_race_and_readers_only_see_whole_files(
    fake_nvcc: FakeNvcc, tmp_path: Path
) -> None:
    fake_nvcc(pause_s=0.02)
    folder = tmp_path / "kernels"
    builders = [builder(folder, len(FEW)) for _ in range(3)]
    seen = 0
    while any(one.poll() is None for one in builders):
        for path in folder.glob("*.cubin"):
            assert path.read_bytes() == WHOLE
            seen += 1
    assert [one.wait() for one in builders] == [0, 0, 0]
    assert seen > 0
    assert check(FEW, folder) == []
    assert len(list(folder.iterdir())) == 2 * len(FEW), "nothing is left over"


def test_a_killed_build_leaves_nothing_that_is_found(fake_nvcc: FakeNvcc, tmp_path: Path) -> None:
    fake_nvcc(pause_s=60)
    folder = tmp_path / "kernels"
    killed = builder(folder, 1)
    until_s = time.monotonic() + 30
    while not list(folder.glob(".build-*/cubin")):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not list(folder.glob("*.cubin"))
    [left] = folder.iterdir()
    assert check(FEW[:1], folder) == [f"{FEW[0].name} is not built"]
    fake_nvcc()
    build(FEW[:1], folder)
    assert check(FEW[:1], folder) == []
    assert clean(FEW[:1], folder) == 0, "it could be a build at work"
    os.utime(left, (0, 0))
    assert clean(FEW[:1], folder) == 1
    assert not left.exists()


def test_what_fails_is_named_and_the_rest_is_not_begun(fake_nvcc: FakeNvcc, tmp_path: Path) -> None:
    log = fake_nvcc(status=2, says="direct.cu(7): error: no such thing")
    with pytest.raises(BuildError, match=r"nvcc failed on direct-bfloat16-x\d+\ndirect\.cu\(7\)"):
        build(VARIANTS, tmp_path)
    assert len(log.read_text().splitlines()) < len(VARIANTS)
    assert not list(tmp_path.glob("*.cubin"))


def test_a_compiler_that_never_ends(
    fake_nvcc: FakeNvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(pause_s=3)
    monkeypatch.setattr(compiler, "_TIMEOUT_S", 0.1)
    with pytest.raises(BuildError, match="nvcc took over 0 s on direct-bfloat16-x64"):
        build([DIRECT], tmp_path)


# The compiler and its words


def test_no_compiler_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(compiler, "_TOOLKIT", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(BuildError, match=r"no CUDA compiler \(nvcc 13\): `pip install"):
        build([DIRECT], tmp_path)


def test_the_compiler_of_the_wheel_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert compiler.find_nvcc() == str(nvcc)


def test_what_the_assembler_says() -> None:
    frame = "{} bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"
    used = "ptxas info    : Used 168 registers, used 16 barriers\n"
    fine = parse_report(frame.format(0, 0, 0) + used)
    assert (fine, fine.fit, fine.faults) == (Report(168, 0, 0, 0), True, "")
    spills = parse_report(frame.format(8, 16, 4) + "ptxas warning : Registers are spilled\n" + used)
    assert spills == Report(168, 8, 16, 4, ("ptxas warning : Registers are spilled",))
    assert spills.faults.startswith("8 bytes stack, 16 bytes spilled, 4 bytes read back, ptxas")
    called = parse_report(frame.format(0, 0, 0) + used + frame.format(24, 0, 0))
    assert not called.fit, "a function that was not inlined counts"
    for words in ("", used, frame.format(0, 0, 0), frame.format(0, 0, 0) + used + used):
        with pytest.raises(BuildError, match="the assembler did not report on one kernel"):
            parse_report(words)


@pytest.mark.parametrize("counts", [(8, 0, 0), (0, 4, 0), (0, 0, 4)])
def test_local_memory_of_any_kind_is_unfit(counts: tuple[int, int, int]) -> None:
    assert not Report(100, *counts).fit
    assert not Report(100, 0, 0, 0, ("ptxas warning : local memory",)).fit
