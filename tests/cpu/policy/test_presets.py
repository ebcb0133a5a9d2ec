"""Every preset in random deployments: requests end once, and each keeps to its own rules."""

from dataclasses import replace
from random import Random

import pytest
from cluster_cases import request
from cluster_world import ClusterTestWorld
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.core import actions as act
from c2cserve.core import events as ev
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.policy.baselines.presets import PRESETS, Preset
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.cluster.policy import ClusterPolicy
from c2cserve.sim.policies.build import cluster_policy

PREFILL = ((1, 0.001), (1000, 0.1))
DECODE = ((512, 1, 0.01), (512, 64, 0.05), (4096, 1, 0.02), (4096, 64, 0.1))


def gpu(name: str, **more: object) -> Slice:
    return Slice(name, "gpu", gpu=GpuShare(name, 100), max_batch=16, **more)


class PresetWorld(ClusterTestWorld):
    """Resizes and recalls are done a moment after they are asked for."""

    def __init__(self, seed: int, slices: list[Slice], preset: Preset, models: int) -> None:
        super().__init__(seed, slices, AdmissionSettings(max_waiting=10_000))
        self.policy = cluster_policy(self.settings, preset)
        self.preset = preset
        self.kv: dict[tuple[str, str], int] = {}
        self.recalls = 0
        self.preempted: set[str] = set()
        names = tuple(f"m{i}" for i in range(models))
        self.at(0.0, ev.Profiled(tuple(s.id for s in slices), names, PREFILL, DECODE))
        for name in names:
            self.add(ModelSpec(name, 20 << 20, 2, 16 << 10, 4096))

    def _happens(self, event: ev.ClusterEvent, incarnation: int) -> ev.ClusterEvent | None:
        """Requests with tokens are preempted too; those that have ended meanwhile do not return."""
        if isinstance(event, ev.Recalled) and event.request.id in self.preempted:
            self.preempted.remove(event.request.id)
            return None if self.jobs[event.request.id].ended else event
        return super()._happens(event, incarnation)

    def _act(self, action: act.ClusterAction) -> None:
        match action:
            case act.ResizeKv(model, slice_id, kv_bytes):
                assert model in self.slices[slice_id].active
                self.kv[model, slice_id] = kv_bytes
                later = self.now + self.random.uniform(0.0, 0.1)
                self.at(later, ev.KvResized(model, slice_id, kv_bytes))
            case act.Preempt(request_id, slice_id):
                live = self.jobs[request_id]
                self.recalls += 1
                self.slices[slice_id].running.discard(request_id)
                live.slice_id, live.resumed = None, True
                live.incarnation += 1
                self.preempted.add(request_id)
                self.at(self.now, ev.Recalled(live.request))
            case _:
                if isinstance(action, act.Deactivate):
                    self.kv.pop((action.model, action.slice_id), None)
                super()._act(action)
        if self.preset.placing == "slinfer":
            for name, up in self.slices.items():
                weights = sum(self.specs[model].weight_bytes for model in up.active)
                kv = sum(size for (_, where), size in self.kv.items() if where == name)
                assert weights + kv <= up.slice.hbm_bytes, "memory runs out"


def world_of(seed: int, preset: Preset, hbm_bytes: int = 80 << 20) -> PresetWorld:
    random = Random(seed)
    slices = [gpu(f"g{i}", hbm_bytes=hbm_bytes) for i in range(random.randint(1, 3))]
    if preset.name != "serverlessllm":
        slices.append(Slice("c0", "cpu", max_batch=16, hbm_bytes=hbm_bytes * 2))
    world = PresetWorld(seed, slices, preset, random.randint(1, 8))
    for i in range(random.randint(1, 120)):
        one = request(f"r{i}", f"m{random.randrange(len(world._heap)) % 8}", random.uniform(0, 4))
        if any(
            one.model == e.spec.id for _, _, e, _ in world._heap if isinstance(e, ev.ModelAdded)
        ):
            world.arrive(replace(one, prompt_len=random.randint(1, 500)))
            if random.random() < 0.1:
                world.at(one.arrival_s + random.uniform(0, 0.5), ev.Cancelled(one.id))
    return world


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_request_ends_exactly_once(name: str, seed: int) -> None:
    world = world_of(seed, PRESETS[name])
    world.run()
    assert all(live.ended for live in world.jobs.values())
    assert not world.policy._where
    assert not world.policy._instances.recalled
    for load in world.policy._slices.values():
        assert load.requests == 0
        assert load.kv_bytes == pytest.approx(0.0, abs=1.0)
        if load.memory is not None:
            assert not load.memory._station
            used = sum(one.spec.weight_bytes + one.kv_bytes for one in load.active.values())
            assert load.memory.budget_bytes == used


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 10**6))
def test_limits_keep_slices_to_one_model_and_gpus_only(seed: int) -> None:
    world = world_of(seed, PRESETS["serverlessllm"])
    world.run()
    for _, _, actions in world.log:
        for action in actions:
            if isinstance(action, act.Activate):
                assert action.slice_id.startswith("g")
    assert all(len(up.active) <= 1 for up in world.slices.values())


@pytest.mark.parametrize(("preset", "after_s"), [("slinfer", 0.25), ("aegaeon", 0.1)])
def test_what_waits_is_tried_again_as_published(preset: str, after_s: float) -> None:
    """SLINFER's code looks at what waits every 0.25 s. Others have no interval of their own."""
    policy = cluster_policy(AdmissionSettings(), PRESETS[preset])
    spec = ModelSpec("a", 10, 2, 1024, 4096)
    tell(policy, 0.0, ev.PoolState(100), ev.ModelAdded(spec), ev.ModelUsable("a"))
    tell(policy, 0.0, ev.ModelLoaded("a", 10, 0.0), ev.Arrived(request("r", "a")))
    sent = [
        at
        for at in (0.1, 0.2, 0.25)
        if act.Dispatch("r", "g0") in tell(policy, at, *[ev.SliceUp(gpu("g0"))] * (at == 0.1))
    ]
    assert sent == [after_s]


def test_a_request_on_its_way_back_outlives_its_slice() -> None:
    """SLINFER takes it from a slice that is lost before it comes back."""
    policy = cluster_policy(AdmissionSettings(), PRESETS["slinfer"])
    spec = ModelSpec("a", 10, 2, 1024, 4096)
    tell(policy, 0.0, ev.PoolState(100), ev.SliceUp(gpu("g0")), ev.SliceUp(gpu("g1")))
    tell(policy, 0.0, ev.ModelAdded(spec), ev.ModelUsable("a"), ev.ModelLoaded("a", 10, 0.0))
    one = request("r", "a")
    assert act.Dispatch("r", "g0") in tell(policy, 0.0, ev.Arrived(one))
    policy._instances._preempt(policy._slices["g0"], "a")
    assert act.Preempt("r", "g0") in tell(policy, 0.1)
    sent = tell(policy, 0.3, ev.SliceLost("g0", (one,)))
    assert act.Dispatch("r", "g1") in sent
    tell(policy, 0.4, ev.Finished("r", 5), ev.Draining())
    assert policy.done


def tell(policy: ClusterPolicy, now: float, *events: ev.ClusterEvent) -> list[act.ClusterAction]:
    for event in events:
        policy.apply(event)
    return list(policy.decide(now))


def test_published_c2cserve_places_what_the_link_carries() -> None:
    """Two streams in time take more than the link has, so the second waits (its section 6.2)."""
    policy = cluster_policy(AdmissionSettings(), PRESETS["c2cserve-published"])
    slice_ = gpu("g0", hbm_bytes=80 << 20, link="l", link_bytes_per_s=15e6)
    tell(policy, 0.0, ev.PoolState(1 << 30), ev.SliceUp(slice_))
    for name in "ab":
        spec = ModelSpec(name, 1 << 20, 2, 1024, 4096)
        tell(policy, 0.0, ev.ModelAdded(spec), ev.ModelUsable(name), ev.ModelLoaded(name, 1, 0.0))
    first = tell(policy, 0.0, ev.Arrived(request("r", "a")))
    assert act.Activate("a", "g0", False) in first
    assert act.Dispatch("r", "g0") in first
    assert not any(
        isinstance(one, act.Dispatch)
        for one in tell(policy, 0.1, ev.Arrived(request("s", "b", 0.1)))
    )
    assert act.Dispatch("s", "g0") in tell(policy, 0.2, ev.Finished("r", 5))


def test_an_idle_instance_is_kept_alive_for_a_while() -> None:
    policy = cluster_policy(AdmissionSettings(), PRESETS["serverlessllm"])
    spec = ModelSpec("a", 10, 2, 1024, 4096)
    tell(policy, 0.0, ev.PoolState(100), ev.SliceUp(gpu("g0")), ev.ModelAdded(spec))
    tell(policy, 0.0, ev.ModelUsable("a"), ev.ModelLoaded("a", 10, 0.0))
    assert act.Activate("a", "g0", True) in tell(policy, 0.0, ev.Arrived(request("r", "a")))
    assert tell(policy, 1.0, ev.Finished("r", 5)) == []
    assert policy.wakeup == 2.0
    assert tell(policy, 2.0) == [act.Deactivate("a", "g0")]


def test_a_keep_alive_that_is_over_does_not_end_a_new_instance() -> None:
    """Its slice was lost and came back, and serves the model again as often as before."""
    policy = cluster_policy(AdmissionSettings(), PRESETS["serverlessllm"])
    spec = ModelSpec("a", 10, 2, 1024, 4096)
    tell(policy, 0.0, ev.PoolState(100), ev.SliceUp(gpu("g0")), ev.ModelAdded(spec))
    tell(policy, 0.0, ev.ModelUsable("a"), ev.ModelLoaded("a", 10, 0.0))
    tell(policy, 0.0, ev.Arrived(request("r", "a")))
    tell(policy, 1.0, ev.Finished("r", 5))
    tell(policy, 1.2, ev.SliceLost("g0", ()), ev.SliceUp(gpu("g0")))
    sent = tell(policy, 1.3, ev.Arrived(request("s", "a", 1.3)))
    assert act.Activate("a", "g0", True) in sent
    assert tell(policy, 2.0) == []
    tell(policy, 3.0, ev.Finished("s", 5))
    assert tell(policy, 4.0) == [act.Deactivate("a", "g0")]
