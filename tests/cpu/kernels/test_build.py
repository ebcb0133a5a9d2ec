"""Building and choosing the native libraries."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from c2cserve.kernels import build, native

TESTS = Path(__file__).parent


def test_no_compiler_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler: install"):
        build.build(tmp_path)


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.BuildError, match="no such flag"):
        build.build(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.so"))


def test_the_best_instruction_set_is_chosen_and_can_be_capped() -> None:
    avx2 = frozenset({"avx2", "fma", "f16c"})
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    bf16 = avx512 | {"avx512_bf16"}
    tiles = bf16 | {"amx_tile", "amx_bf16", "amx_int8"}
    assert native.best_isa(tiles) == native.best_isa(tiles, intel=True) == "amx"
    assert native.best_isa(tiles, "amx", intel=True) == "amx"
    assert native.best_isa(tiles, "avx512_bf16", intel=True) == "avx512_bf16"
    assert native.best_isa(tiles, "avx512") == "avx512"
    assert native.best_isa(bf16) == "avx512_bf16"
    assert native.best_isa(bf16, intel=True) == "avx512"
    assert native.best_isa(bf16, "avx512_bf16", intel=True) == "avx512_bf16"
    assert native.best_isa(avx2, intel=True) == "avx2"
    assert native.best_isa(bf16, "amx", intel=True) == "avx512"
    assert native.best_isa(bf16, "amx") == "avx512_bf16"
    assert native.best_isa(tiles - {"avx512_bf16"}) == "avx512"
    assert native.best_isa(avx512) == "avx512"
    assert native.best_isa(avx512, "avx2") == "avx2"
    assert native.best_isa(avx2) == "avx2"
    assert native.best_isa(avx2, "avx512") == "avx2"
    assert native.best_isa(frozenset()) == "generic"
    with pytest.raises(ValueError, match="C2CSERVE_CPU_ISA is 'sse'"):
        native.best_isa(avx2, "sse")


@pytest.mark.parametrize(("vendor", "intel"), [("GenuineIntel", True), ("AuthenticAMD", False)])
def test_the_vendor_is_read(tmp_path: Path, vendor: str, *, intel: bool) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu avx2\n\n")
    assert native.is_intel(file) is intel
    assert native.cpu_flags(file) == {"fpu", "avx2"}


@pytest.mark.parametrize("granted", [True, False])
def test_tiles_are_used_only_if_the_system_grants_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, granted: bool
) -> None:
    flags = frozenset({"avx2", "amx_tile", "amx_bf16"})
    monkeypatch.setattr(native, "cpu_flags", lambda: flags)
    monkeypatch.setattr(native, "request_tiles", lambda: 0 if granted else errno.EPERM)
    native.tiles_granted.cache_clear()
    try:
        for _ in range(2):
            assert ("amx_tile" in native.usable_flags()) is granted
        assert caplog.text.count("refuses AMX tiles") == (0 if granted else 1)
        if not granted:
            with pytest.raises(OSError, match="refuses AMX tiles"):
                native.load_library.__wrapped__("amx")
    finally:
        native.tiles_granted.cache_clear()


@pytest.mark.parametrize("granted", [True, False])
@pytest.mark.parametrize("asked", [None, "avx512_bf16", "amx"])
def test_the_system_is_asked_for_tiles_only_if_they_are_used(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: str | None,
    *,
    granted: bool,
) -> None:
    avx512 = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}
    requests: list[str] = []

    def answer() -> int:
        requests.append("tiles")
        return 0 if granted else errno.EPERM

    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset({*avx512, "amx_tile", "amx_bf16"}))
    monkeypatch.setattr(native, "request_tiles", answer)
    monkeypatch.setattr(native, "is_intel", lambda: True)
    if asked is None:
        monkeypatch.delenv("C2CSERVE_CPU_ISA", raising=False)
    else:
        monkeypatch.setenv("C2CSERVE_CPU_ISA", asked)
    native.tiles_granted.cache_clear()
    try:
        wants = asked != "avx512_bf16"
        best = "amx" if granted else "avx512"
        for _ in range(2):
            assert native.chosen_isa() == (best if wants else asked)
        assert requests == (["tiles"] if wants else [])
        assert caplog.text.count("refuses AMX tiles") == (wants and not granted)
    finally:
        native.tiles_granted.cache_clear()


def test_a_missing_library_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "LIBRARY_FOLDER", tmp_path)
    with pytest.raises(native.KernelsMissing, match=r"python -m c2cserve\.kernels\.build"):
        native.load_library.__wrapped__("generic")


def test_converting_does_not_import_torch() -> None:
    probe = (
        "import sys, c2cserve.kernels.native as n; n.load_library(n.chosen_isa());"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_sanitizers_have_nothing_to_say(tmp_path: Path) -> None:
    """The kernels' own tests again, on libraries built with ASan and UBSan."""
    build.build(tmp_path, sanitize=True)
    runtime = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    chosen = [str(p) for p in sorted(TESTS.glob("test_*.py")) if p.name != Path(__file__).name]
    script = (
        "import sys, pathlib, pytest\n"
        "from c2cserve.kernels import native\n"
        f"native.LIBRARY_FOLDER = pathlib.Path({str(tmp_path)!r})\n"
        f"sys.exit(pytest.main(['-p', 'no:cacheprovider', '--timeout=800', *{chosen!r}]))\n"
    )
    environment = {
        **os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True,
        timeout=850, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
