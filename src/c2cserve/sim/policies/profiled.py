"""Step times at sample points, as a profiling run before serving would give them to the policies.

The measurements are those of an operator on each kind of slice: alone and without noise. The steps
that run later take other times, from `sim.world.costs` with contention and noise.
"""

from collections.abc import Iterator, Sequence

from c2cserve.core.events import Profiled
from c2cserve.core.step import SeqStep, Step
from c2cserve.sim.world.costs import Costs
from c2cserve.sim.world.hardware import SimMachine, SimulatedSlice
from c2cserve.sim.world.shapes import SimModel

_PROMPTS = tuple(1 << power for power in range(13))
_BATCHES = tuple(1 << power for power in range(8))
_LENGTHS = (512, 1024, 2048, 4096)


def profiled(machine: SimMachine, models: Sequence[SimModel]) -> Iterator[Profiled]:
    """Yield one profile for each shape on each kind of slice."""
    costs = Costs(machine.hardware.tables)
    alike: dict[object, list[SimulatedSlice]] = {}
    for simulated in machine.slices:
        alike.setdefault(
            (simulated.slice.kind, simulated.flops, simulated.hbm_bytes_per_s), []
        ).append(simulated)
    shapes: dict[str, list[SimModel]] = {}
    for model in models:
        shapes.setdefault(model.shape.name, []).append(model)
    for slices in alike.values():
        for group in shapes.values():
            yield _profile(costs, slices, group)


def _profile(
    costs: Costs, slices: Sequence[SimulatedSlice], models: Sequence[SimModel]
) -> Profiled:
    simulated, model = slices[0], models[0]
    longest = model.spec.max_context - 1

    def seconds(parts: tuple[SeqStep, ...]) -> float:
        return costs.step(Step(0, model.spec.id, parts), model, simulated, 1.0).floor_s

    prompts = [tokens for tokens in _PROMPTS if tokens <= longest]
    lengths = [length for length in _LENGTHS if length <= longest] or [longest]
    return Profiled(
        slices=tuple(one.slice.id for one in slices),
        models=tuple(one.spec.id for one in models),
        prefill=tuple((n, seconds((SeqStep("", 0, n, (), True, True),))) for n in prompts),
        decode=tuple(
            (length, batch, seconds((SeqStep("", length, 1, (), False, True),) * batch))
            for length in lengths
            for batch in _BATCHES
        ),
    )
