"""What a server says of a run's phases, from two looks at its metrics."""

import io

from rich.console import Console

from c2cserve.bench.phases import PHASES, Phases, phase_table, phases_of
from c2cserve.bench.scrape import Histogram, Scrape, _Sample

INF = float("inf")


def page(prefill: int, hit: float, peer: float = 0.0) -> Scrape:
    """`prefill` requests of 5 to 10 ms, 8 ms on average."""
    name, labels = PHASES["prefill"], {"model_name": "a"}
    counts = {"0.005": 0, "0.01": prefill, "+Inf": prefill}
    samples = [_Sample(f"{name}_bucket", {**labels, "le": le}, n) for le, n in counts.items()]
    samples.append(_Sample(f"{name}_sum", labels, 0.008 * prefill))
    for kind, value in (("hit", hit), ("streamed", 4 * hit), ("peer", peer)):
        metric = f"c2cserve:slice_weights_{kind}_bytes_total"
        samples += [_Sample(metric, {"slice": one}, value / 2) for one in ("gpu0", "gpu1")]
    return Scrape(tuple(samples))


def shown(*columns: tuple[str, Phases]) -> str:
    table = phase_table(columns)
    assert table is not None
    text = io.StringIO()
    Console(width=200, file=text).print(table)
    return " ".join(text.getvalue().split())


def test_a_run_is_what_came_between_two_looks() -> None:
    run = phases_of(page(30, 3 << 30, 1 << 30)).since(phases_of(page(10, 1 << 30)))
    assert list(run.seconds) == ["prefill"], "phases no request had are left out"
    assert run.seconds["prefill"].count == 20
    text = shown(("", run))
    assert "prefill" in text
    assert "8.00 ms" in text or "8.0 ms" in text
    assert "read in HBM 2.0 GiB, streamed 8.0 GiB, of these from a neighbour 1.0 GiB" in text


def test_kinds_of_requests_stand_beside_each_other() -> None:
    cold = phases_of(page(5, 0.0))
    warm = cold + phases_of(page(2, 0.0))
    assert warm.seconds["prefill"].count == 7
    text = shown(("cold", cold), ("warm", warm))
    assert "cold requests" in text
    assert "warm p99" in text
    assert "weights" not in text, "CPU slices read where weights are"


def test_a_server_that_tells_nothing_has_no_table() -> None:
    assert phase_table([("", phases_of(Scrape()))]) is None
    assert phase_table([("", Phases())]) is None
    idle = phases_of(page(3, 0.0))
    assert phase_table([("", idle.since(idle))]) is None


def test_histograms_add_up() -> None:
    one = Histogram(((0.1, 1.0), (INF, 2.0)), 0.5)
    assert one.plus(Histogram()) == Histogram().plus(one) == one
    assert one.plus(one) == Histogram(((0.1, 2.0), (INF, 4.0)), 1.0)


def test_a_histogram_that_fell_counts_from_zero() -> None:
    """Its model was removed and added again, or the server was started again."""
    was, now = Histogram(((INF, 5.0),), 9.0), Histogram(((INF, 2.0),), 1.0)
    assert now.since(was) == now
    assert was.since(now) == Histogram(((INF, 3.0),), 8.0)
