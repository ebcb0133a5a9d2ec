"""Which known speeds a GPU gets that was not measured, and what is said about them."""

import logging
from typing import Any

import pytest
import torch

from c2cserve.engine.gpu import setup
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_h100, assumed_h200, assumed_profile
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.choice.profile import Profile, decode_profile, encode_profile
from c2cserve.kernels.gpu.gemm.choice.rates import Rates

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
GB = 10**9


@pytest.mark.parametrize(("gpu", "profile"), [(H100, assumed_h100()), (H200, assumed_h200())])
def test_a_gpu_that_is_known_gets_its_own_speeds(gpu: str, profile: Profile) -> None:
    found = assumed_profile(gpu)
    assert (found.profile, found.exact, found.profile.machine.gpu) == (profile, True, gpu)
    assert found.note == f"known speeds of an {gpu}; nothing was measured here"
    assert decode_profile(encode_profile(profile)) == profile


@pytest.mark.parametrize(
    ("gpu", "memory_bytes", "nearest"),
    [
        ("NVIDIA H100 PCIe", 80 * GB, H100),
        ("NVIDIA H100 NVL", 94 * GB, H100),
        ("NVIDIA H200 NVL", 141 * GB, H200),
        ("NVIDIA H200 MIG 1g.18gb", 17 * GB, H200),
        ("NVIDIA GH200 480GB", 96 * GB, H100),
        ("NVIDIA GH200 144G HBM3e", 144 * GB, H200),
        ("NVIDIA B200", 180 * GB, H200),
        ("NVIDIA A100-SXM4-40GB", 40 * GB, H100),
    ],
)
def test_any_other_gets_the_nearest_and_it_is_said(
    gpu: str, memory_bytes: int, nearest: str
) -> None:
    found = assumed_profile(gpu, memory_bytes)
    assert (found.exact, found.profile.machine.gpu) == (False, nearest)
    assert f"{nearest}, the nearest GPU that is known" in found.note


def test_an_h100_is_an_h200_with_slower_memory() -> None:
    slow, fast = Rates(assumed_h100()), Rates(assumed_h200())
    copied = 1 * GB
    assert 2 * copied / slow.hbm_s(copied, copied, 132) == pytest.approx(3.0e12)
    assert copied / slow.hbm_s(copied, 0, 132) == pytest.approx(2.9e12)
    assert slow.engine_bytes_per_s("host", 1) == pytest.approx(55.2e9)
    assert slow.peak_flops_per_s(132) == fast.peak_flops_per_s(132) == pytest.approx(8e14, rel=0.01)
    large = 8192
    whole = 2.0 * large**3 / slow.matmul_s(large, large, large, 132)
    assert whole == pytest.approx(798e12, rel=0.02)
    # Few rows are no faster than W is read.
    assert slow.matmul_s(1, 16384, 4096, 132) >= 16384 * 4096 * 2 / 2.9e12


@pytest.mark.parametrize("home", ["host", "peer"])
def test_it_is_good_for_picking(home: Any) -> None:
    chooser = Chooser(assumed_h100())
    for m in (1, 64, 2048):
        pick = chooser.pick(Question(m, 4096, 4096, "bfloat16", home, 132))
        assert pick.floor_s <= pick.predicted_s < 3 * pick.floor_s


@pytest.mark.parametrize(
    ("name", "says"),
    [(H100, f"an {H100}; nothing"), ("NVIDIA X", f"an {H100}, the nearest GPU that is known")],
)
def test_a_slice_warns_which_it_takes(
    name: str, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Properties:
        total_memory = 80 * GB

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    with caplog.at_level(logging.WARNING):
        assert setup._profile(0, "assumed") == assumed_h100()
    assert says in caplog.text
    assert name in caplog.text
