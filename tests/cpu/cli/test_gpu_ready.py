"""A GPU that cannot serve yet: each obstacle has its fix, and CPUs never replace it unasked."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from c2cserve.core.machine import Gpu, GpuShare, Machine, NumaNode, Slice
from c2cserve.devices.gpus import GpuProblem
from c2cserve.devices.plan import SliceWishes, plan_all
from c2cserve.engine.gpu import requirements as gpu_ready
from c2cserve.kernels.gpu.aot import compiler
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_h200
from c2cserve.kernels.gpu.gemm.choice.profile import save_profile
from c2cserve.kernels.gpu.gemm.dataflows.table import SERVING_VARIANTS
from c2cserve.serving import startup
from c2cserve.terminal.output import CliError
from c2cserve.transfer.path_profile import PathProfile, Rates, save_paths

H200 = Gpu(0, "GPU-0", "NVIDIA H200", 141 << 30, 132)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With torch for CUDA, the kernels that serving needs and a profile; a test takes one away."""
    monkeypatch.setenv("C2CSERVE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu_ready, "version", lambda name: "2.11.0+cu130")
    monkeypatch.setattr(gpu_ready, "_is_there", lambda module: True)
    folder = tmp_path / "kernels"
    monkeypatch.setattr(compiler, "default_folder", lambda: folder)
    folder.mkdir()
    for variant in SERVING_VARIANTS:
        compiler.cubin_path(folder, variant).touch()
    save_profile(assumed_h200())
    return tmp_path


def test_nothing_is_in_the_way(home: Path) -> None:
    assert list(gpu_ready.obstacles([H200])) == []


@pytest.mark.parametrize("torch", ["2.13.0+cpu", ""])
def test_torch_for_cpus(home: Path, monkeypatch: pytest.MonkeyPatch, torch: str) -> None:
    def version(name: str) -> str:
        if not torch:
            raise gpu_ready.PackageNotFoundError(name)
        return torch

    monkeypatch.setattr(gpu_ready, "version", version)
    (obstacle,) = gpu_ready.obstacles([H200])
    assert "torch" in obstacle.text
    assert ".[gpu]" in obstacle.fix


def test_missing_modules(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ready, "_is_there", lambda module: module != "triton")
    (obstacle,) = gpu_ready.obstacles([H200])
    assert "triton" in obstacle.text


def test_missing_kernels(home: Path) -> None:
    compiler.cubin_path(home / "kernels", SERVING_VARIANTS[3]).unlink()
    (obstacle,) = gpu_ready.obstacles([H200])
    assert obstacle.text.startswith(f"1 of {len(SERVING_VARIANTS)} GPU kernels")
    assert obstacle.fix == "c2cserve kernels build"


def test_no_profile_of_this_gpu(home: Path) -> None:
    other = Gpu(1, "GPU-1", "NVIDIA GH200 480GB", 96 << 30, 132)
    (obstacle,) = gpu_ready.obstacles([H200, other])
    assert "GH200" in obstacle.text
    assert "c2cserve profile" in obstacle.fix
    assert list(gpu_ready.obstacles([H200, other], "assumed")) == []


def test_a_profile_without_neighbours(home: Path) -> None:
    """Measured where there was one GPU: memory of another cannot be planned with."""
    known = assumed_h200()
    alone = {name: link for name, link in known.links.items() if name == "host"}
    save_profile(msgspec.structs.replace(known, links=alone))
    assert list(gpu_ready.obstacles([H200])) == []
    (obstacle,) = gpu_ready.obstacles([H200], lent=True)
    assert "neighbour" in obstacle.text
    assert list(gpu_ready.obstacles([H200], "assumed", lent=True)) == []


def test_serve_does_not_fall_back_by_itself(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "usable_gpus", lambda: (H200,))
    assert startup.ready_gpus("measured") == (H200,)
    compiler.cubin_path(home / "kernels", SERVING_VARIANTS[0]).unlink()
    with pytest.raises(CliError, match=r"kernels build; or .* with --gpu-slices none"):
        startup.ready_gpus("measured")

    def broken() -> tuple[Gpu, ...]:
        raise GpuProblem("driver/library version mismatch")

    monkeypatch.setattr(startup, "usable_gpus", broken)
    with pytest.raises(CliError, match="version mismatch"):
        startup.ready_gpus("measured")


def test_slices_know_their_share_of_the_measured_link(home: Path) -> None:
    rate = assumed_h200().links["host"].to_gpu_bytes_per_s
    gpu = replace(H200, memory_free_bytes=140 << 30)
    machine = Machine(
        "test", (0, 1), 1 << 40, 1 << 40, 1 << 40, (), (NumaNode(0, (0, 1), 0),), (gpu,),
        cores=((0,), (1,)), shm_free_bytes=1 << 40,
    )  # fmt: skip
    for choice in ("measured", "assumed"):
        wishes = SliceWishes(cpu_slices=1, gpu_slices="16x7", gpu_profile=choice)
        *parts, cpu = startup.with_links(plan_all(machine, wishes), (gpu,))
        assert {one.link_bytes_per_s for one in parts} == {rate / 7}
        assert all(one.swaps_weights for one in parts)
        assert not cpu.swaps_weights
        assert {one.relayed_bytes_per_s for one in parts} == {0.0}
    (home / "profile.json").unlink()
    with pytest.raises(CliError, match="c2cserve profile"):
        startup.with_links(plan_all(machine, SliceWishes()), (gpu,))


def test_weights_that_always_stream_come_over_the_link_to_what_lends(home: Path) -> None:
    links = assumed_h200().links
    share = GpuShare(H200.uuid, 132, lenders=("GPU-near",), lent_bytes=1 << 30)
    parts = [
        Slice(f"gpu0.{part}", "green", gpu=share, hbm_bytes=1 << 30, link="gpu0.h2d")
        for part in (0, 1)
    ]
    alone = [replace(one, gpu=replace(share, lenders=())) for one in parts]

    def rates(slices: list[Slice], *, streams: bool) -> set[float]:
        found = startup.with_links(slices, (H200,), streams=streams)
        return {one.link_bytes_per_s for one in found}

    host, peer = (links[one].to_gpu_bytes_per_s / 2 for one in ("host", "peer"))
    assert rates(parts, streams=True) == {peer}
    assert rates(parts, streams=False) == rates(alone, streams=True) == {host}


def test_slices_know_what_neighbours_add(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By measured paths. Without them, loads are planned as over one link, which is said."""
    near = replace(H200, id=1, uuid="GPU-near", readable=(H200.uuid,))
    gpus = replace(H200, readable=("GPU-near",)), near
    share = GpuShare(H200.uuid, 132, neighbours=("GPU-near",))
    slices = [
        Slice(f"gpu0.{part}", "green", gpu=share, hbm_bytes=1 << 30, link="gpu0.h2d")
        for part in (0, 1)
    ]
    assert {one.relayed_bytes_per_s for one in startup.with_links(slices, gpus)} == {0.0}
    assert "paths were not measured: run `c2cserve profile --gpu-relays`" in caplog.text
    rates = Rates(55e9, 55e9, 100e9)
    measured = PathProfile(
        H200.name, datetime.now(UTC), (rates, rates), combined=(Rates(101e9, 98e9, 126e9),)
    )
    save_paths(measured)
    for one in startup.with_links(slices, gpus):
        assert one.relayed_bytes_per_s == pytest.approx((101e9 - 55e9) / 2)
        assert one.load_bytes_per_s == one.link_bytes_per_s + one.relayed_bytes_per_s
    alone = [replace(one, gpu=replace(share, neighbours=())) for one in slices]
    assert {one.relayed_bytes_per_s for one in startup.with_links(alone, gpus)} == {0.0}
