"""Whom to refuse, and when to ask again. Ours: DESIGN's admission, in its first form."""

from dataclasses import dataclass

from c2cserve.core.request import Request

_WEIGHT = 0.1
_WINDOW_S = 0.5


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    max_waiting: int = 1024
    """Requests queued at the controller; one more is refused with 429."""
    patience: float = 20.0
    """A request is refused when it has waited, or is sure to wait, so many times its TTFT target:
    whoever asked has given up by then. 1: as soon as the target can not be met. 0: never."""
    no_slice_grace_s: float = 30.0
    """How long requests wait while no slice is up (one is being restarted), before 503."""
    foresee: bool = True
    """Refuse as soon as the expected wait is too long; else only once somebody waited so long."""


@dataclass(slots=True)
class Throughput:
    """Requests finished per second lately while others waited: what the machine can do. (What it
    does while nobody waits says how much is asked of it, not how much it can take.)"""

    per_s: float = 0.0
    _finished: int = 0
    _since_s: float | None = None

    def finished(self) -> None:
        self._finished += 1

    def look(self, now: float, *, saturated: bool) -> None:
        """`saturated`: requests wait that could run if there was room."""
        if not saturated:
            self._since_s = None
            return
        if self._since_s is None:
            self._finished, self._since_s = 0, now
        elapsed = now - self._since_s
        if elapsed >= _WINDOW_S and self._finished:
            rate = self._finished / elapsed
            self.per_s = rate if self.per_s == 0.0 else self.per_s + _WEIGHT * (rate - self.per_s)
            self._finished, self._since_s = 0, now

    def wait_s(self, ahead: int) -> float:
        """Expected wait behind so many requests; 0 while nothing is known."""
        return ahead / self.per_s if self.per_s > 0.0 else 0.0


def refusal(
    request: Request, ahead: int, throughput: Throughput, settings: AdmissionSettings, now: float
) -> tuple[str, float] | None:
    """Why a waiting request must be refused, and when to try again; None if it may wait on."""
    if settings.patience <= 0.0:
        return None
    waited_s = now - request.arrival_s
    expected_s = waited_s + throughput.wait_s(ahead) * settings.foresee
    if expected_s <= settings.patience * request.slo.ttft_s:
        return None
    reason = (
        f"the first token is due within {request.slo.ttft_s:g} s; after waiting {waited_s:.1f} s "
        f"with {ahead} requests ahead it would take {expected_s:.1f} s"
    )
    return reason, max(1.0, throughput.wait_s(ahead))
