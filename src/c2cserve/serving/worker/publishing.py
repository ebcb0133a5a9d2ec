"""What a slice's loop tells others of itself: counters on its page, and what it measured."""

from collections.abc import Callable, Sequence

from c2cserve.runtime.slice_stats import SliceStats, StatSource
from c2cserve.serving.ipc import messages as msg
from c2cserve.serving.ipc.channel import Channel
from c2cserve.serving.ipc.status_page import StatusPage

_PUBLISH_S = 0.05
"""How old figures of the policy and the engine may be on the page while steps are in flight. Making
them takes a few per cent of a small step."""
_REPORT_S = 1.0


class Publishing:
    def __init__(
        self,
        channel: Channel,
        page: StatusPage,
        policy_stats: Callable[[], SliceStats],
        measured: Callable[[], Sequence[msg.Measured]],
    ) -> None:
        """`policy_stats` is read before the loop sleeps and every few steps; `measured` about once
        a second."""
        self._channel = channel
        self._page = page
        self.policy_stats = policy_stats
        self._measured = measured
        self._published_s = self._reported_s = 0.0

    def due(self, now: float) -> bool:
        """Return whether the figures on the page are as old as they may become."""
        return now - self._published_s > _PUBLISH_S

    def publish(self, engine_stats: SliceStats, now: float) -> None:
        """Put what the policy and the engine count on the page."""
        self._published_s = now
        self._page.write_stats(self.policy_stats(), StatSource.POLICY)
        self._page.write_stats(engine_stats, StatSource.ENGINE)

    def report_measured(self, now: float) -> None:
        """Report about once a second what the policy has measured."""
        if now - self._reported_s > _REPORT_S:
            self._reported_s = now
            for measured in self._measured():
                self._channel.send(msg.encode(measured))
