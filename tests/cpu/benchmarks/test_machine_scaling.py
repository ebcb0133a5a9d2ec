"""A better machine serves no smaller share in time. Runs are equal for equal seeds."""

import pytest
from machine_scaling import CASES, measure


def test_a_better_machine_is_not_worse() -> None:
    factors = {"link": (4.0,), "hbm": (2.0,), "gpu": (2.0,)}
    *_, found = measure(CASES["a100x1"], factors, range(2), 80, processes=1)
    assert list(found["points"]) == ["as it is", "link x 4", "hbm x 2", "gpu x 2"]
    assert 0.0 < found["points"]["as it is"]["in_time"] < 0.9, "it has more than it can do"
    assert found["worst"] >= -0.01


@pytest.mark.slow
def test_models_with_equal_load_are_served_alike() -> None:
    *_, found = measure(CASES["a100x1"], {"link": (4.0,)}, range(20), 500, processes=1)
    assert all(point["least_model"] >= 0.5 for point in found["points"].values())
