"""What a server checks before it listens."""

import resource
import shutil
from pathlib import Path

import pytest

from c2cserve.core.machine import GpuShare, Slice
from c2cserve.devices.plan import NO_GPUS, SliceWishes
from c2cserve.serving.live_server import remove_record
from c2cserve.serving.startup import fitting_policy, open_files, plan_machine
from c2cserve.terminal.output import CliError, show_bytes


@pytest.mark.parametrize(
    ("files", "slices", "texts", "enough"),
    [(32, 1, 2, False), (79, 1, 2, False), (80, 1, 2, True), (80, 2, 2, False),
     (80, 1, 3, False), (1024, 64, 8, True)],
)  # fmt: skip
def test_a_server_says_how_many_open_files_it_needs(
    monkeypatch: pytest.MonkeyPatch, files: int, slices: int, texts: int, enough: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    if enough:
        assert open_files(slices, texts) == files
        return
    with pytest.raises(CliError) as caught:
        open_files(slices, texts)
    needed = 64 + 8 * slices + 4 * texts
    said = f"{files} open files are allowed (ulimit -n), and this server needs at least {needed}"
    assert str(caught.value).startswith(said)
    assert "ulimit -n 65536" in str(caught.value)


def test_no_limit_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    open_files(64, 8)


def test_a_pool_larger_than_its_filesystem_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free = shutil.disk_usage(tmp_path).free
    wishes = SliceWishes(cpu_slices=1, gpu_slices=NO_GPUS)
    plan_machine(wishes, tmp_path, 1 << 20)
    assert "--pool-bytes" not in caplog.text
    plan_machine(wishes, tmp_path, 2 * free)
    assert f"--pool-bytes allows {show_bytes(2 * free)}, and {tmp_path} has" in caplog.text
    assert "--shm-size" in caplog.text


def test_kv_that_no_memory_is_there_for_is_refused_by_its_option(tmp_path: Path) -> None:
    wishes = SliceWishes(cpu_slices=2, gpu_slices=NO_GPUS, cpu_kv_bytes=100 << 40)
    with pytest.raises(CliError, match=r"KV takes 219902325555200 bytes.* with --kv-bytes$"):
        plan_machine(wishes, tmp_path, None)


def test_a_record_that_cannot_be_written_anew_is_refused_by_its_option(tmp_path: Path) -> None:
    remove_record(tmp_path / "none")
    with pytest.raises(CliError, match=f"^--record {tmp_path}: Is a directory$"):
        remove_record(tmp_path)


def test_a_policy_fits_the_slices_or_says_what_does(caplog: pytest.LogCaptureFixture) -> None:
    cpu, gpu = Slice("c", "cpu"), Slice("g", "gpu", gpu=GpuShare("GPU", 0))
    assert fitting_policy("serverlessllm", [gpu, gpu]) == "serverlessllm"
    assert fitting_policy("serverlessllm", [cpu]) == "sllm+c"
    assert "sllm+c" in caplog.text
    with pytest.raises(CliError, match="sllm"):
        fitting_policy("serverlessllm", [cpu, gpu])
    with pytest.raises(CliError, match="--host-kv-bytes"):
        fitting_policy("superinfer", [gpu])
    for policy in ("c2cserve", "slinfer", "aegaeon", "sllm+c", "fcfs"):
        assert fitting_policy(policy, [cpu, gpu]) == policy
