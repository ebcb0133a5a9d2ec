"""The timer of a GPU lane, with events that are over when the test says so."""

from c2cserve.engine.gpu.step_timer import EventTimer


class Event:
    """A point in a stream that runs at the pace of `Stream`."""

    def __init__(self, stream: "Stream") -> None:
        self._stream = stream
        self.at_ms = 0.0

    def record(self) -> None:
        self.at_ms = self._stream.enqueued_ms

    def query(self) -> bool:
        return self.at_ms <= self._stream.now_ms

    def elapsed_time(self, end_event: "Event") -> float:
        assert self.query()
        assert end_event.query()
        return end_event.at_ms - self.at_ms


class Stream:
    def __init__(self) -> None:
        self.now_ms = self.enqueued_ms = 0.0
        self.made = 0

    def event(self) -> Event:
        self.made += 1
        return Event(self)


def test_a_step_is_measured_from_its_first_event_to_its_last() -> None:
    stream = Stream()
    timer = EventTimer(stream.event)
    timer.begin("prefill")
    stream.enqueued_ms = 12.0
    timer.end()
    timer.begin("decode")
    stream.enqueued_ms = 14.0
    timer.end()
    assert timer.read() == {"prefill": 0.0, "decode": 0.0, "switched": 0.0}, "none is over"
    stream.now_ms = 13.0
    assert timer.read() == {"prefill": 0.012, "decode": 0.0, "switched": 0.0}
    stream.now_ms = 14.0
    assert timer.read() == {"prefill": 0.012, "decode": 0.002, "switched": 0.0}


def test_steps_use_the_events_of_steps_before_them() -> None:
    stream = Stream()
    timer = EventTimer(stream.event)
    for _ in range(100):
        timer.begin("switched")
        stream.enqueued_ms += 1.0
        timer.end()
        stream.now_ms = stream.enqueued_ms
    assert timer.read()["switched"] > 0.0999
    assert stream.made <= 4


def test_what_failed_is_not_measured() -> None:
    stream = Stream()
    timer = EventTimer(stream.event)
    timer.begin("prefill")
    stream.enqueued_ms = stream.now_ms = 5.0
    timer.begin("decode")
    stream.enqueued_ms = stream.now_ms = 6.0
    timer.end()
    assert timer.read() == {"prefill": 0.0, "decode": 0.001, "switched": 0.0}
