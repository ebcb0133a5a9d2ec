from collections.abc import Sequence

from c2cserve.runtime.driver import run


class Script:
    """A policy, its source and its executor in one, which notes the order of things."""

    def __init__(self, ticks: list[tuple[float, list[str]]]) -> None:
        self.ticks = ticks
        self.notes: list[object] = []
        self.seen: list[str] = []

    @property
    def done(self) -> bool:
        return not self.ticks

    @property
    def wakeup(self) -> float | None:
        return len(self.notes) + 0.5

    def wait(self, until: float | None) -> tuple[float, Sequence[str]]:
        self.notes.append(("wait", until))
        return self.ticks.pop(0)

    def apply(self, event: str) -> None:
        self.seen.append(event)

    def decide(self, now: float) -> Sequence[str]:
        self.notes.append(("decide", now, tuple(self.seen)))
        decided = [event.upper() for event in self.seen]
        self.seen.clear()
        return decided

    def submit(self, action: str) -> None:
        self.notes.append(("submit", action))

    def record(self, now: float, events: Sequence[str], actions: Sequence[str]) -> None:
        self.notes.append(("record", now, tuple(events), tuple(actions)))


def test_all_events_of_a_tick_come_before_its_decision_and_the_record_before_its_actions() -> None:
    script = Script([(1.0, ["a", "b"]), (2.0, [])])
    run(script, script, script, script.record)
    assert script.notes == [
        ("wait", 0.5),
        ("decide", 1.0, ("a", "b")),
        ("record", 1.0, ("a", "b"), ("A", "B")),
        ("submit", "A"),
        ("submit", "B"),
        ("wait", 5.5),
        ("decide", 2.0, ()),
        ("record", 2.0, (), ()),
    ]


def test_a_policy_that_is_done_is_not_asked_again() -> None:
    script = Script([])
    run(script, script, script, script.record)
    assert script.notes == []
