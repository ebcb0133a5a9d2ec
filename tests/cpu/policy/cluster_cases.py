"""Requests, models and slices for tests of the controller's policy."""

from dataclasses import replace
from random import Random

from cluster_world import ClusterTestWorld

from c2cserve.core.events import (
    Cancelled,
    ModelRemoving,
)
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request, Slo
from c2cserve.policy.cluster.admission import AdmissionSettings


def spec(name: str, size: int = 10, **more: object) -> ModelSpec:
    return ModelSpec(name, size, 2, 1024, 4096, **more)


def slice_(name: str = "s0", max_batch: int = 4, max_active: int = 8) -> Slice:
    return Slice(name, "cpu", max_batch=max_batch, max_active=max_active)


def request(
    name: str, model: str = "a", at: float = 0.0, prompt: int = 10, ttft_s: float = 1.0,
    priority: int = 0,
) -> Request:  # fmt: skip
    return Request(name, model, prompt, 8, at, Slo(ttft_s, 0.1), priority=priority)


def random_world(seed: int) -> ClusterTestWorld:
    """Everything at once: many models in a pool that is too small, slices that die, loads that
    fail, clients that leave, models that are removed."""
    random = Random(seed)
    slices = [
        slice_(f"s{i}", random.randint(1, 6), random.randint(1, 4))
        for i in range(random.randint(1, 4))
    ]
    limits = AdmissionSettings(
        max_waiting=random.choice([3, 20, 1000]), patience=random.choice([0.0, 1.0, 20.0]),
        no_slice_grace_s=random.choice([0.2, 30.0]),
    )  # fmt: skip
    world = ClusterTestWorld(
        seed, slices, limits, budget_bytes=random.randint(30, 200),
        service_s=random.choice([0.02, 0.3]), fail_load=random.choice([0.0, 0.2]),
    )  # fmt: skip
    names = [f"m{i}" for i in range(random.randint(1, 12))]
    for i, name in enumerate(names):
        one = spec(
            name, random.randint(5, 40), pinned=random.random() < 0.1,
            priority=random.randint(0, 2), keep_warm_s=random.choice([0.0, 5.0]),
        )  # fmt: skip
        world.add(one, when=0.0 if i % 2 else random.uniform(0, 1))
        if random.random() < 0.15:
            world.at(random.uniform(1, 3), ModelRemoving(name))
    for i in range(random.randint(1, 250)):
        arrival = random.uniform(0, 4)
        one = request(f"r{i}", random.choice(names), arrival, random.randint(1, 99))
        world.arrive(replace(one, priority=random.choice([0, 0, 3])))
        if random.random() < 0.15:
            world.at(arrival + random.uniform(0, 0.5), Cancelled(one.id))
    for _ in range(random.randint(0, 3)):
        world.lose(random.uniform(0.5, 4), random.choice(slices), random.uniform(0.01, 2))
    return world
