"""What executors report, kept for tests that run one without a worker."""

from collections.abc import Sequence

from c2cserve.core.events import SliceEvent
from c2cserve.core.request import Delta, FinishReason


class EngineReports:
    def __init__(self) -> None:
        self.events: list[SliceEvent] = []
        self.deltas: list[Delta] = []
        self.reports = 0

    def report(self, event: SliceEvent | None, deltas: Sequence[Delta]) -> None:
        """The `engine.report.Report` of an executor."""
        self.reports += 1
        self.deltas += deltas
        if event is not None:
            self.events.append(event)

    def of(self, name: str) -> list[Delta]:
        return [delta for delta in self.deltas if delta.request_id == name]

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.of(name) for token in delta.tokens]

    def ended(self, name: str) -> FinishReason | None:
        return next((delta.finish for delta in self.of(name) if delta.finish), None)
