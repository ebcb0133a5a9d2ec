"""The only loop. Live and simulated runs differ in the source and the executor alone."""

from collections.abc import Sequence
from typing import TypeVar

from c2cserve.core.policy import Policy
from c2cserve.runtime.ports import Executor, Recorder, Source

E = TypeVar("E")
A = TypeVar("A")


def tick(
    policy: Policy[E, A],
    now: float,
    events: Sequence[E],
    executor: Executor[A],
    record: Recorder[E, A],
) -> None:
    """Run one tick: apply all its events, then decide once. (The simulator runs many loops in one
    thread, and calls this for each tick.)"""
    for event in events:
        policy.apply(event)
    actions = policy.decide(now)
    record(now, events, actions)
    for action in actions:
        executor.submit(action)


def run(
    policy: Policy[E, A], source: Source[E], executor: Executor[A], record: Recorder[E, A]
) -> None:
    """Run ticks until the policy is done."""
    while not policy.done:
        now, events = source.wait(policy.wakeup)
        tick(policy, now, events, executor, record)
