"""Loads over several links: their own first, and those of neighbours that are idle."""

import json
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.cli.main import app
from c2cserve.serving.catalog_shapes import find_models
from c2cserve.sim.planning.plan import Planner
from c2cserve.sim.planning.show import answer
from c2cserve.sim.planning.trials import without_gpus
from c2cserve.sim.run import Scenario, simulate
from c2cserve.sim.workload.build import WorkloadSettings
from c2cserve.sim.world.hardware import SliceSettings, build
from c2cserve.sim.world.links import PART_BYTES, Network, PathsLoad
from c2cserve.sim.world.timeline import Timeline

LINKS = [("own", 10.0), ("near", 10.0), ("far", 10.0), ("host", 25.0)]
"""Parts of a load in a second; all sizes are in such parts."""
PATHS = (("own", "host"), ("near", "host"), ("far", "host"))


class World:
    def __init__(self) -> None:
        self.timeline = Timeline()
        rates = [(name, rate * PART_BYTES) for name, rate in LINKS]
        self.network = Network(self.timeline, rates)
        self.ended_s: list[float] = []

    def load(self, paths: int, size: float = 100.0, cap: float = inf) -> PathsLoad:
        ended = self.ended_s
        return PathsLoad(
            self.network, PATHS[:paths], size * PART_BYTES, cap * PART_BYTES,
            lambda: ended.append(self.timeline.now),
        )  # fmt: skip

    def run(self) -> None:
        while self.timeline.step():
            pass


@pytest.mark.parametrize(("paths", "seconds"), [(1, 10.0), (2, 5.0), (3, 4.0)])
def test_idle_links_add_up_to_what_host_memory_gives(paths: int, seconds: float) -> None:
    world = World()
    world.load(paths)
    world.run()
    assert world.ended_s == [pytest.approx(seconds, rel=0.03)]


def test_a_neighbours_own_bytes_come_first() -> None:
    """Its link relays nothing but the part that was on its way, until it is idle again."""
    world = World()
    own: list[float] = []
    mine = 20.0 * PART_BYTES
    world.network.start(("near", "host"), mine, inf, lambda: own.append(world.timeline.now))
    world.load(2, 40.0)
    world.run()
    assert own == [pytest.approx(2.0)]
    assert world.ended_s == [pytest.approx(3.0, rel=0.05)]  # 20 alone, then 20 over both


def test_a_stopped_load_ends_nowhere_and_frees_its_links() -> None:
    world = World()
    load = world.load(3)
    world.timeline.at(1.0, load.stop)
    world.run()
    assert not world.ended_s
    assert not any(link.flows for link in world.network.links.values())


@given(
    sizes=st.lists(st.floats(0.5, 30.0), min_size=1, max_size=6),
    paths=st.integers(1, 3), cap=st.floats(1.0, 20.0),
)  # fmt: skip
def test_every_byte_comes_once(sizes: list[float], paths: int, cap: float) -> None:
    world = World()
    for size in sizes:
        world.load(paths, size, cap)
    world.run()
    assert len(world.ended_s) == len(sizes)
    world.network.update_totals()
    assert world.network.links["host"].moved_bytes == pytest.approx(sum(sizes) * PART_BYTES)


def test_slices_know_what_their_neighbours_add() -> None:
    """Two H200: 111 GB/s of host memory, of which a GPU's own link has 55.6."""
    for relays in (False, True):
        machine = build("h200-x2", SliceSettings(relays=relays))
        for one in machine.slices:
            assert one.slice.link_bytes_per_s == pytest.approx(55.4e9)
            added = 110.8e9 - 55.6e9 if relays else 0.0
            assert one.slice.relayed_bytes_per_s == pytest.approx(added)
            assert len(one.relays) == relays
    assert build("h200-x2", SliceSettings(relays=True)).slices[0].relays == (
        ("gpu1.h2d", "host.h2d", "host.both"),
    )


def test_a_lost_gpu_lends_no_link() -> None:
    [left] = without_gpus(build("h200-x2", SliceSettings(relays=True)), 1).slices
    assert left.relays == ()
    assert left.slice.relayed_bytes_per_s == 0.0


def test_a_single_gpu_has_no_neighbours() -> None:
    [one] = build("h200-x1", SliceSettings(relays=True)).slices
    assert one.relays == ()
    assert one.slice.relayed_bytes_per_s == 0.0


def test_first_tokens_of_cold_models_come_sooner_with_relays() -> None:
    scenario = Scenario(
        "h200-x2", "llama-3.1-8b*4",
        WorkloadSettings("synthetic:rate=0.5,sources=4,duration=20"),
        slices=SliceSettings(relays=True), noise=0.0,
    )  # fmt: skip
    models = find_models(scenario.catalog)
    fast = simulate(scenario, models)
    slow = simulate(replace(scenario, slices=SliceSettings()), models)
    assert fast.requests == slow.requests > 0
    assert fast.ttft.p99 < 0.8 * slow.ttft.p99


LOAD = WorkloadSettings("synthetic:rate=0.5,sources=2,duration=8")


def test_the_command_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "simulate", "--hardware", "h200-x2", "--catalog", "llama-3.1-8b*2", "--trace", LOAD.trace,
        "--gpu-relays",
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="0"):
        app([*command, "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert found["without_relays"]["requests"] == found["requests"]
    assert found["without_relays"]["ttft"]["p99"] > found["ttft"]["p99"]
    with pytest.raises(SystemExit, match="0"):
        app(command)
    assert "GPUs that relay loads for each other" in capsys.readouterr().out


@pytest.mark.parametrize("hardware", ["h200-x2", "h200-x1"])
def test_a_plan_says_what_relays_change(hardware: str) -> None:
    scenario = Scenario(
        hardware, "llama-3.1-8b*2", LOAD, "10,1", slices=SliceSettings(relays=True), noise=0.0
    )
    models = find_models(scenario.catalog)
    planner = Planner(scenario, models, 0.5, lambda what, done, left: None)
    plan = planner.largest_catalogue(hardware, 2)
    lines = [line for line in answer(plan, 0.5) if line.startswith("With one link for each GPU")]
    assert len(lines) == (hardware == "h200-x2")
    if hardware == "h200-x2":
        assert plan.best is not None
        assert plan.without_relays is not None
        assert plan.without_relays.ttft_p95_s > plan.best.ttft_p95_s
