"""Requests of many choices in a simulation, with the policies of a server."""

from collections import defaultdict

from c2cserve.policy.baselines.presets import C2CSERVE
from c2cserve.sim.world.front_end import FrontEnd, FrontEndSimulation
from c2cserve.sim.world.hardware import SliceSettings, build
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import catalogue
from c2cserve.sim.world.simulation import Settings


def test_choices_end_alike_and_another_tenant_is_not_refused() -> None:
    models = catalogue("llama-3.2-1b*1")
    model = models[0].spec.id
    asked = [
        SimRequest(0.5 + 0.3 * number, model, 256, 100, (), "loops", f"g{number}")
        for number in range(24) for _ in range(64)
    ]  # fmt: skip
    asked += [SimRequest(1.0 + 0.1 * number, model, 256, 20, (), "second") for number in range(60)]
    asked.sort(key=lambda one: one.arrival_s)
    machine = build("h200-x1", SliceSettings(max_batch=16), C2CSERVE)
    simulation = FrontEndSimulation(machine, models, asked, Settings(seed=1), FrontEnd())
    simulation.run()
    ends = defaultdict[str, set[str]](set)
    for one in simulation.requests.ended:
        ends[one.request.group].add(one.ending)
    assert ends.pop("") == {"finished"}, "those of the second tenant"
    assert {len(each) for each in ends.values()} == {1}
    assert set.union(*ends.values()) == {"finished", "rejected"}
