"""The packing that `places.py` estimates with."""

from places import pack

from c2cserve.sim.world.requests import SimRequest


def _asks(model: str, *arrivals_s: float) -> list[SimRequest]:
    return [SimRequest(at, model, 512, 100) for at in arrivals_s]


def test_the_densest_busy_periods_are_served_first() -> None:
    popular, rare = _asks("a", 0.0, 0.1, 0.2, 0.3), _asks("b", 0.0, 50.0, 100.0)
    by_model = {"a": popular, "b": rare}
    asked, served, left = pack(by_model, "gpu", 1, 2)
    assert served == 7
    assert not left
    assert 0.15 < asked < 0.25, "three answers of 5 s and four that overlap, in 100 s"
    _, served, left = pack(by_model, "gpu", 0, 2)
    assert served == 0
    assert sum(map(len, left.values())) == 7


def test_a_place_that_is_full_serves_the_dense_ones() -> None:
    dense, long = _asks("a", 0.0, 0.1, 0.2, 0.3), _asks("b", 0.0)
    _, served, left = pack({"a": dense, "b": long, "c": _asks("c", 6.0)}, "gpu", 1, 2)
    assert 4 <= served < 6
    assert "a" not in left
