"""Steps that wait for weights, in the order of their launch.

pool     weights that are being loaded into host memory     nobody is notified of their end
HBM      layers on their way there (`Arrived`)              the slice's thread is notified
"""

from collections.abc import Callable, Iterator

from c2cserve.engine.run import Run, Work

Arrived = Callable[[str], int | None]
"""Returns how many of a model's layers steps may read where they read weights, the first ones.
Others are on their way there. None: steps read all of them where they are."""


class ParkedSteps:
    def __init__(self, arrived: Arrived) -> None:
        self._arrived = arrived
        self._steps: list[tuple[Run, Work]] = []

    def __iter__(self) -> Iterator[Run]:
        return (run for run, _ in self._steps)

    @property
    def awaits_pool(self) -> bool:
        """Whether a step waits for the pool."""
        return any(run.awaits_pool for run in self)

    def add(self, run: Run, work: Work) -> None:
        self._steps.append((run, work))

    def arrived(self, run: Run) -> int | None:
        """Return how many layers a step may read, and note it: others may come at any time."""
        run.layers_there = self._arrived(run.step.model)
        return run.layers_there

    def behind(self, run: Run) -> bool:
        """Return whether one of its requests has an earlier step that is parked."""
        ids = {part.request_id for part in run.step.seqs}
        return any(part.request_id in ids for other in self for part in other.step.seqs)

    def ready(self) -> Iterator[tuple[Run, Work]]:
        """Take those out that may go on, one after another: each may park again meanwhile."""
        waiting, self._steps = self._steps, []
        for run, work in waiting:
            if self.behind(run) or self._has_nothing_new(run):
                self._steps.append((run, work))
            else:
                yield run, work

    def take(self, model: str) -> list[Run]:
        """Take a model's steps out. They do not go on."""
        taken = [(run, work) for run, work in self._steps if run.step.model == model]
        self._steps = [one for one in self._steps if one[0].step.model != model]
        for _, work in taken:
            work.close()
        return [run for run, _ in taken]

    def _has_nothing_new(self, run: Run) -> bool:
        """Return whether a step waits for layers of which none have come since it looked."""
        if run.awaits_pool or run.layers_there is None:
            return False
        return self._arrived(run.step.model) == run.layers_there
