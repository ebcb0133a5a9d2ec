"""Requests that take turns, in simulated worlds: what is expected of answers may be wrong, and
models share a slice's memory."""

from dataclasses import replace
from random import Random

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.core.request import Slo
from c2cserve.policy.baselines.presets import C2CSERVE
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.sim.world.hardware import SliceSettings, build
from c2cserve.sim.world.requests import SimRequest, TrackedRequest
from c2cserve.sim.world.shapes import catalogue
from c2cserve.sim.world.simulation import Settings, Simulation

SLO = Slo(5.0, 0.1)


def world(requests: list[SimRequest], models: str, kv_bytes: int, host: int) -> Simulation:
    """A GPU whose memory has room for these models and so many bytes of KV."""
    made = catalogue(models)
    machine = build("h200-x1", SliceSettings(kv_share=1.0, max_batch=256, host_kv_bytes=host))
    simulated = machine.slices[0]
    size = (sum(one.spec.weight_bytes for one in made) + kv_bytes) & -(2 << 20)
    slice_ = replace(simulated.slice, hbm_bytes=size, kv_bytes=size)
    machine = replace(machine, slices=(replace(simulated, slice=slice_),))
    plain = AdmissionSettings(max_waiting=10**6, patience=0.0)
    simulation = Simulation(
        machine, made, requests, lambda prompt: SLO, Settings(C2CSERVE, plain, seed=1, as_live=True)
    )  # fmt: skip
    simulation.run()
    return simulation


answers = st.lists(
    st.tuples(st.floats(0, 4), st.integers(1, 1500), st.integers(1, 900)), min_size=1, max_size=40
)


@settings(max_examples=examples(30), deadline=None)
@given(answers, st.booleans())
def test_kv_is_dropped_only_where_host_memory_is_full(
    drawn: list[tuple[float, int, int]], roomy: bool
) -> None:
    """Host memory for all KV twice, as half of it may hold copies of running requests; or for next
    to nothing. The first answers may be short, so that the next ones are expected to be."""
    requests = [
        SimRequest(at, "llama-3.1-8b/0", prompt, output)
        for at, prompt, output in sorted(drawn)
    ]  # fmt: skip
    block = catalogue("llama-3.1-8b")[0].spec.kv_block_bytes
    needed = sum((prompt + output) // 16 + 1 for _, prompt, output in drawn) * block
    ran = world(requests, "llama-3.1-8b", 400 << 20, 2 * needed if roomy else 4 * block)
    lost = [one.preempted for one in ran.requests.ended]
    assert [one.ending for one in ran.requests.ended] == ["finished"] * len(requests)
    assert ran.slices["gpu0"].policy.kv_drops == sum(lost)
    assert not roomy or not any(lost), "there was room on the host"
    assert max(lost) <= len(requests), "each request displaces another one at most once"


def in_time(ended: list[TrackedRequest], model: str) -> float:
    own = [one for one in ended if one.request.model == model]
    return sum(one.ttft_s <= SLO.ttft_s for one in own) / len(own)


def test_a_model_that_is_asked_rarely_gets_its_turn_beside_one_that_fills_the_memory() -> None:
    """An 8B under more than its memory holds, and a 3B. In time for its first token, neither has
    less than half of their mean."""
    random, requests = Random(1), list[SimRequest]()
    for model, rate in (("llama-3.1-8b/0", 20.0), ("llama-3.2-3b/0", 1.0)):
        now = 0.0
        while (now := now + random.expovariate(rate)) < 14.0:
            requests.append(
                SimRequest(now, model, random.randint(200, 1800), random.randint(50, 450))
            )
    requests.sort(key=lambda one: one.arrival_s)
    ran = world(requests, "llama-3.1-8b,llama-3.2-3b", 2 * 10**9, 24 << 30)
    ended = list(ran.requests.ended)
    shares = [in_time(ended, model) for model in ("llama-3.1-8b/0", "llama-3.2-3b/0")]
    assert ran.slices["gpu0"].use.moved_bytes > 0
    assert min(shares) >= 0.5 * sum(shares) / 2
