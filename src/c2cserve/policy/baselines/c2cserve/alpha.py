"""How much of a hybrid GEMM is done output-stationary, by what is saturated (C2CServe section 7).

Larger alpha reads weights over the link more often, smaller alpha writes partial sums to HBM more
often. Algorithm 2, once per control interval, with smoothed values:

    delta = U_link - U_HBM         |delta| < tau: keep alpha
    alpha <- clip(alpha - eta * sign(delta), 0, 1)     eta: fast if L > L_budget, else slow

A fixed eta steps back and forth over a balance that is narrower than eta, and smoothed values lag
behind the last step. So (ours) a step is halved each time the direction turns. From the third step
in one direction on it is doubled again, up to eta. (A balance between the last two alphas would
have been found in two steps.) After a step nothing is decided until the values before it have
almost no weight. Then alpha converges for every plant whose delta grows with alpha, however steep.
At the balance a GEMM takes at most 1 / (1 - tau) of the least time that any alpha could give it.
"""

from dataclasses import dataclass
from math import ceil, log

from c2cserve.core.actions import SetAlpha
from c2cserve.core.events import GemmsMeasured

VARIANTS = 32
"""Alpha takes effect in steps of 1 / VARIANTS: kernels are prebuilt, and smaller steps gain little.
"""


@dataclass(frozen=True, slots=True)
class AlphaSettings:
    tau: float = 0.1
    """Dead band of the difference of two utilizations."""
    fast: float = 0.125
    """The largest step while the GEMM misses its budget."""
    slow: float = 0.03125
    weight: float = 0.5
    """The weight of the newest sample in the exponential averages, 0..1."""

    @property
    def settling(self) -> int:
        """Samples until those before a step weigh less than a tenth of the dead band."""
        if self.weight >= 1.0:
            return 1
        return ceil(log(0.1 * self.tau) / log(1.0 - self.weight))


@dataclass(frozen=True, slots=True)
class GemmSample:
    """Measurements of a GEMM (or a layer's GEMMs) since the last sample.

    Utilizations are shares of the slice's bandwidth of HBM and link, 0..1 (section 7.2).
    """

    latency_s: float
    hbm_utilization: float
    link_utilization: float


class AlphaControl:
    """Alpha of one model's GEMMs on one slice.

    It begins at 0, the dataflow that reads least over the shared link (section 6.4). `sample` is
    called between layers or requests, never inside a kernel. Its result is for the next one.
    """

    __slots__ = ("_average", "_direction", "_run", "_settings", "_step", "_unsettled", "alpha")

    def __init__(self, settings: AlphaSettings | None = None) -> None:
        self._settings = settings or AlphaSettings()
        self.alpha = 0.0
        self._average: GemmSample | None = None
        self._direction = self._run = 0
        self._step = self._settings.fast
        self._unsettled = 0

    @property
    def variant(self) -> float:
        """Alpha as kernels are built for it."""
        return round(self.alpha * VARIANTS) / VARIANTS

    def sample(self, new: GemmSample, budget_s: float) -> float:
        """Do one control interval. Return alpha from now on (Algorithm 2)."""
        old, weight = self._average or new, self._settings.weight
        self._average = average = GemmSample(
            old.latency_s + weight * (new.latency_s - old.latency_s),
            old.hbm_utilization + weight * (new.hbm_utilization - old.hbm_utilization),
            old.link_utilization + weight * (new.link_utilization - old.link_utilization),
        )
        if self._unsettled:
            self._unsettled -= 1
            return self.alpha
        delta = average.link_utilization - average.hbm_utilization
        if abs(delta) >= self._settings.tau:
            self._move(-1 if delta > 0 else 1, average.latency_s > budget_s)
        return self.alpha

    def _move(self, direction: int, late: bool) -> None:
        self._run = self._run + 1 if direction == self._direction else 1
        if direction == -self._direction:
            self._step /= 2
        elif self._run > 2:
            self._step *= 2
        self._direction = direction
        self._step = min(self._step, self._settings.fast if late else self._settings.slow)
        before = self.alpha
        self.alpha = min(1.0, max(0.0, before + direction * self._step))
        if self.alpha != before:
            self._unsettled = self._settings.settling


class AlphaBank:
    """The controls of all models of a slice. A step's budget is that of all its GEMMs together, so
    a model has one control."""

    def __init__(self, settings: AlphaSettings | None = None) -> None:
        self._settings = settings
        self._controls: dict[str, AlphaControl] = {}

    def sample(self, event: GemmsMeasured, budget_s: float) -> list[SetAlpha]:
        """Return what to set from now on, if anything, after a step that should take `budget_s`."""
        control = self._controls.setdefault(event.model, AlphaControl(self._settings))
        before = control.variant
        use = GemmSample(event.latency_s, event.hbm_utilization, event.link_utilization)
        control.sample(use, budget_s)
        return [SetAlpha(event.model, control.variant)] if control.variant != before else []
