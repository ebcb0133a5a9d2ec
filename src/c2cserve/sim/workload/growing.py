"""Load that grows with the catalogue."""

from collections.abc import Sequence
from dataclasses import replace

from c2cserve.sim.workload.build import WorkloadSettings, by_source, workload
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import SimModel

_SHIFT = 0.381966
"""Delay of each copy of the sources after the one before, as a share of the trace's length. It is
the golden ratio's, so that no two copies coincide."""


class GrowingLoad:
    """Every model brings the requests of one source of the trace.

    A catalogue with more models than sources repeats these, shifted in time around the trace. If a
    trace names no sources, the number of requests is fixed and all models share them."""

    def __init__(self, settings: WorkloadSettings) -> None:
        """Raises as `workload.build.workload`."""
        self._settings = settings
        self._sources = list(by_source(settings).values())
        self.empty = not any(self._sources)
        """Whether there are no requests."""
        named = bool(self._sources) and bool(self._sources[0][0].model)
        self.grows = named
        """Whether more models mean more requests."""
        self._length_s = max((lines[-1].arrival_s for lines in self._sources), default=0.0)

    def of(self, models: Sequence[SimModel]) -> list[SimRequest]:
        """Return the requests of such a catalogue, by time."""
        if not self.grows:
            return workload(self._settings, models)
        found: list[SimRequest] = []
        for index, model in enumerate(models):
            copy, source = divmod(index, len(self._sources))
            found += self._shifted(self._sources[source], copy * _SHIFT, model.spec.id)
        return sorted(found, key=lambda request: request.arrival_s)

    def _shifted(self, lines: Sequence[SimRequest], shift: float, model: str) -> list[SimRequest]:
        if not shift:
            return [replace(line, model=model) for line in lines]
        length_s = self._length_s
        later_s = shift * length_s
        return [
            replace(line, model=model, arrival_s=(line.arrival_s + later_s) % length_s)
            for line in lines
        ]
