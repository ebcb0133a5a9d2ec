"""Two lanes in simulated worlds: the server's rule, and what a stream takes from its neighbour."""

from random import Random

import pytest
from worlds import check_end, requests

from c2cserve.core.request import Slo
from c2cserve.policy.baselines.presets import FCFS
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.sim.report import report
from c2cserve.sim.world.hardware import SliceSettings, build
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import catalogue, interleaved
from c2cserve.sim.world.simulation import Settings, Simulation

NEAR, FAR = "llama-3.2-3b/0", "llama-3-70b/0"


def simulated(lanes: int, asked: list[SimRequest], models: str, noise: float = 0.0) -> Simulation:
    machine = build("h200-x1", SliceSettings(kv_share=0.5, lanes=lanes), FCFS)
    plain = AdmissionSettings(max_waiting=10**6, patience=0.0)
    simulation = Simulation(
        machine, interleaved(catalogue(models)), asked, lambda _: Slo(60.0, 60.0),
        Settings(FCFS, plain, seed=1, noise=noise),
    )  # fmt: skip
    simulation.run()
    return simulation


def near_tpot_s(lanes: int, *, far: bool) -> float:
    """The near model's time per token, beside a far one that is larger than the cache. Both have
    answered a request before, and the near one is in the cache."""
    asked = [SimRequest(0.0, NEAR, 16, 1000)]
    if far:
        asked += [SimRequest(4.0, FAR, 16, 40)]
    asked += [SimRequest(8.0, NEAR, 17, 400)]
    simulation = simulated(lanes, asked, "llama-3.2-3b*1,llama-3-70b*1")
    ended = simulation.requests.ended
    assert all(one.ending == "finished" for one in ended)
    [last] = [one for one in ended if one.request.prompt_len == 17]
    return (last.last_s - last.first_s) / (last.output - 1)


def test_a_stream_takes_little_from_its_neighbour() -> None:
    alone_s = near_tpot_s(2, far=False)
    assert alone_s == pytest.approx(near_tpot_s(1, far=False), rel=0.05)
    assert near_tpot_s(2, far=True) < 1.2 * alone_s
    assert near_tpot_s(1, far=True) > 5 * alone_s, "in one lane its steps wait for the stream's"


@pytest.mark.parametrize("seed", range(4))
def test_all_requests_end_and_runs_repeat(seed: int) -> None:
    models = "llama-3.2-3b*3,llama-3.1-8b*2,llama-3-70b*1"
    names = interleaved(catalogue(models))
    runs = [
        simulated(2, requests(Random(seed), names, 40, 4.0), models, noise=0.1) for _ in range(2)
    ]
    for one in runs:
        check_end(one)
    assert report(runs[0]) == report(runs[1])
