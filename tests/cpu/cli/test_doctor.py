"""`doctor`: what it finds here, and every problem it can tell, each with its fix."""

import json
import re
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from c2cserve.cli.main import app
from c2cserve.core.machine import Gpu, Link, Machine, NumaNode
from c2cserve.serving import machine_checks as checks
from c2cserve.serving.machine_checks import Finding, Level

GIB = 1 << 30
MACHINE = Machine(
    cpu_name="test",
    cpus=(0, 1),
    memory_bytes=32 * GIB,
    memory_available_bytes=16 * GIB,
    shm_bytes=16 * GIB,
    isa=("avx2",),
    numa=(NumaNode(0, (0, 1), 32 * GIB),),
    cores=((0,), (1,)),
    shm_free_bytes=16 * GIB,
)


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as done:
        app(["doctor", *args])
    assert isinstance(done.value.code, int)
    return done.value.code


def test_this_machine_can_serve(capsys: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert run("--json", "--port", str(port)) == 0
    found = json.loads(capsys.readouterr().out)
    topics = {finding["topic"] for finding in found["findings"]}
    assert {"CPU", "kernels", "memory", "shared memory", "slices", "port", "libraries"} <= topics
    assert found["slices"][0]["id"] == "cpu0"
    assert found["pool_bytes"] > 0
    assert found["machine"]["links"][0]["bytes_per_s"] > 1e8


def test_the_table_names_the_slices(capsys: Any) -> None:
    assert run() == 0
    out = capsys.readouterr().out
    assert "cpu0" in out
    assert "KV arena" in out
    (line,) = [one for one in out.splitlines() if "would start" in one]
    assert re.fullmatch(r"c2cserve serve would start \d+ slices? and a pool of [\d.]+ .iB", line)


def test_nowhere_to_share_weights_prevents_serving(tmp_path: Path, capsys: Any) -> None:
    assert run("--pool-dir", str(tmp_path / "none")) == 1
    captured = capsys.readouterr()
    assert "does not exist" in captured.out
    assert "fix:" in captured.out
    assert "cannot serve" in captured.err


def test_used_port_is_a_warning_with_a_fix() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        finding = only(checks.check_port("127.0.0.1", taken.getsockname()[1]))
    assert finding.level is Level.WARN
    assert "in use" in finding.text
    assert "--port" in finding.fix


@pytest.mark.parametrize(
    ("host", "says"),
    [("192.0.2.1", "Cannot assign requested address"), ("nowhere.invalid", "not known")],
)
def test_an_address_of_no_interface_is_mended_by_another_host(host: str, says: str) -> None:
    finding = only(checks.check_port(host, 8000))
    assert finding.level is Level.WARN
    assert says in finding.text
    assert "--host" in finding.fix
    assert "--port" not in finding.fix


@pytest.mark.parametrize(("load", "said"), [(0.4, False), (1.7, True)])
def test_a_rate_that_was_measured_on_a_busy_machine_says_so(
    load: float, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    machine = replace(MACHINE, links=(Link("host", "host", "cpu", 50e9),))
    (text,) = [one.text for one in checks.check_cpu(machine) if one.topic == "memory link"]
    assert text.startswith("50.0 GB/s")
    assert ("load 1.7" in text) == said


def test_locked_memory_is_said_where_gpus_need_it() -> None:
    assert "locked" not in only(checks.check_limits(MACHINE)).text
    gpu = Gpu(0, "u0", "NVIDIA H200", 141 * GIB, 132, memory_free_bytes=140 * GIB)
    assert "locked" in only(checks.check_limits(replace(MACHINE, gpus=(gpu,)))).text


def test_kv_that_leaves_no_memory_for_weights_prevents_serving() -> None:
    slices, finding = checks.check_slices(replace(MACHINE, memory_available_bytes=32 << 20))
    assert slices == ()
    assert only(finding).level is Level.FAIL
    assert "--kv-bytes" in only(finding).text


@pytest.mark.parametrize(
    ("free_bytes", "level"),
    [(16 * GIB, Level.OK), (3 * GIB, Level.WARN), (64 << 20, Level.FAIL)],
)
def test_small_shared_memory(tmp_path: Path, free_bytes: int, level: Level) -> None:
    machine = replace(MACHINE, shm_free_bytes=free_bytes)
    finding = only(checks.check_shared_memory(machine, tmp_path))
    assert finding.level is level
    assert ("--shm-size" in finding.fix) == (level is not Level.OK)


def test_missing_kernels_say_how_to_build_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("C2CSERVE_CPU_ISA", "sse9")
    finding = only(checks.check_kernels())
    assert finding.level is Level.FAIL
    assert "sse9" in finding.text
    assert "c2cserve.kernels.build" in finding.fix


def test_kernels_here() -> None:
    finding = only(checks.check_kernels())
    assert finding.level is Level.OK
    assert finding.text.split(",")[0] in {"amx", "avx512_bf16", "avx512", "avx2", "generic"}


@pytest.mark.parametrize(
    ("flags", "asked", "isa", "said"),
    [
        ({"avx2"}, None, "generic", "chosen of "),
        ({"avx2"}, "generic", "generic", "as asked for"),
        ({"avx2"}, "avx512", "avx2", "the best that it has up to avx512"),
        ({"amx_tile", "amx_bf16"}, None, "amx", "chosen of "),
        ({"amx_tile", "amx_bf16"}, None, "avx512", "the system refuses them"),
        ({"amx_tile", "amx_bf16"}, "amx", "avx512", "the system refuses them"),
        ({"amx_tile", "amx_bf16"}, "amx", "amx", "as asked for"),
        ({"amx_tile", "amx_bf16"}, "avx512", "avx512", "as asked for"),
        ({"avx512_bf16"}, None, "avx512", "this CPU's bf16 instructions are slower"),
        ({"avx512_bf16"}, "avx512", "avx512", "as asked for"),
    ],
)
def test_why_a_level_is_used_is_said(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], asked: str | None, isa: str, said: str
) -> None:
    monkeypatch.setattr("c2cserve.kernels.native.cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr("c2cserve.kernels.native.tiles_granted", lambda: isa == "amx")
    monkeypatch.setattr("c2cserve.kernels.native.chosen_isa", lambda: isa)
    monkeypatch.setattr("c2cserve.kernels.native.load_library", lambda isa: None)
    monkeypatch.setenv("C2CSERVE_CPU_ISA", asked or "")
    finding = only(checks.check_kernels())
    assert finding.text.startswith(f"{isa}, ")
    assert said in finding.text
    assert ("refuses" in finding.text) is ("refuses" in said)


def test_quota_below_one_cpu() -> None:
    findings = list(checks.check_cpu(replace(MACHINE, cpu_quota=0.5)))
    assert findings[0].level is Level.WARN
    assert "0.5" in findings[0].text


def test_gpus_and_mig() -> None:
    gpus = (
        Gpu(0, "u0", "NVIDIA H200", 141 * GIB, 132, memory_free_bytes=140 * GIB),
        Gpu(1, "u1", "NVIDIA H200", 18 * GIB, 16, mig=True),
    )
    found = [finding.text for finding in checks.check_gpus(replace(MACHINE, gpus=gpus))]
    assert found[0].startswith("GPU of 0: NVIDIA H200, 141 GiB (140 GiB free), 132 SMs")
    assert found[1].startswith("MIG instance of 1: NVIDIA H200, 18.0 GiB")


def test_which_gpus_can_lend_memory() -> None:
    one = Gpu(0, "u0", "NVIDIA H200", 141 * GIB, 132, readable=("u2", "hidden"))
    other = Gpu(2, "u2", "NVIDIA H200", 141 * GIB, 132)
    found = list(checks.check_gpus(replace(MACHINE, gpus=(one, other))))
    assert found[0].text.endswith("reads the memory of GPU 2")
    assert found[1].text.endswith("reads the memory of no other GPU")
    assert (found[2].topic, found[2].level) == ("peer memory", Level.OK)
    alone = checks.check_gpus(replace(MACHINE, gpus=(other,)))
    assert not any(finding.topic == "peer memory" for finding in alone)


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_LIBRARIES", ("numpy", "no-such-library"))
    levels = {finding.level: finding for finding in checks.check_libraries()}
    assert "no-such-library" in levels[Level.FAIL].text
    assert "numpy" in levels[Level.OK].text


def test_slices_and_why() -> None:
    slices, findings = checks.check_slices(MACHINE)
    assert [one.id for one in slices] == ["cpu0"]
    assert only(findings).level is Level.OK
    assert only(findings).text.startswith("1 of 2 cores: ")
    assert "--slices" not in only(findings).text, "two slices of one core are no gain"
    large = replace(MACHINE, cpus=tuple(range(16)), cores=tuple((cpu,) for cpu in range(16)),
                    numa=(replace(MACHINE.numa[0], cpus=tuple(range(16))),))  # fmt: skip
    slices, findings = checks.check_slices(large)
    assert len(slices) == 1
    assert "serve --slices 4 gives more tokens" in only(findings).text, "for many models"
