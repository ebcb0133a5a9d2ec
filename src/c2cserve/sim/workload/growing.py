"""Load that grows with the catalogue."""

from collections.abc import Sequence
from dataclasses import replace

from c2cserve.sim.workload.build import WorkloadSettings, by_source, workload
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import SimModel

_SHIFT = 0.381966
"""Of the trace's length, by which each copy of its sources is later than the one before; by the
golden ratio, so that no two copies coincide."""


class GrowingLoad:
    """Every model brings the requests of one source of the trace. Catalogues of more models than
    sources repeat these, shifted in time around the trace. Where a trace names no sources its
    requests stay as many, spread over all models there are."""

    def __init__(self, settings: WorkloadSettings) -> None:
        """Raises as `workload.build.workload`."""
        self._settings = settings
        self._sources = list(by_source(settings).values())
        named = bool(self._sources) and bool(self._sources[0][0].model)
        self.grows = named
        """Whether more models mean more requests."""
        self._length_s = max((lines[-1].arrival_s for lines in self._sources), default=0.0)

    def of(self, models: Sequence[SimModel]) -> list[SimRequest]:
        """The requests of such a catalogue, by time."""
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
