"""`benchmarks/gemm_launch.py` times launches without a GPU, and says that there was none."""

import gemm_launch
import pytest
import torch

from c2cserve.kernels.gpu.launch_context import LaunchContext


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are real where a GPU is")
def test_launches_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_launch, "_SAMPLES", 3)
    found = gemm_launch.measure(launches=5)
    assert found["driver"].startswith("none")
    times = {(row["home"], row["rows"], row["kind"]): row["us"] for row in found["rows"]}
    for home in gemm_launch.HOMES:
        for rows in gemm_launch.ROWS:
            assert 0 < times[home, rows, "again"] < times[home, rows, "first"]
    assert isinstance(vars(LaunchContext)["stream"], property), "the driver is there again"
