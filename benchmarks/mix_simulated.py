"""A cell of `weights_mix.py` in the simulator: the same slice, links, step times and requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from catalogue_files import Pick
from gpu_models import config_of
from mix_load import SLO, Answer, Arena, popularity, warm_up_s
from mix_machine import Host, Refused, weights_bytes_per_s
from mix_times import DEVICE, Times

from c2cserve.bench.plan import Shape as Asked
from c2cserve.core.machine import Slice
from c2cserve.engine.models.layout import plan_layout
from c2cserve.memory.segment import segment_bytes
from c2cserve.sim.run import Scenario, prepare
from c2cserve.sim.workload.build import WorkloadSettings
from c2cserve.sim.world.hardware import Hardware, SimMachine, SimulatedSlice
from c2cserve.sim.world.requests import SimRequest, TrackedRequest
from c2cserve.sim.world.shapes import Shape, SimModel
from c2cserve.sim.world.tables import Tables

_DISK_BYTES_PER_S = 5e9
"""Never used: all models are in the pool before the first request."""
_H2D, _D2H, _BOTH = "gpu0.h2d", "gpu0.d2h", "host.both"


@dataclass(frozen=True, slots=True)
class Simulated:
    answers: list[Answer]
    """In the order of the requests, as a live run has them: they are compared one by one."""
    fetches: int
    """Loads of whole models into the slice's memory, those of `warm` too."""


def simulate(
    host: Host, slice_: Slice, arena: Arena, models: Sequence[SimModel], times: Times | None,
    asked: Sequence[Asked], warm: Sequence[Asked], seed: int, answer_s: float,
) -> Simulated:  # fmt: skip
    """Run the requests on the simulated machine, after those of `warm`. Policies are the server's:
    the preset that it has (`c2cserve`), which decides on one step at a time.

    A request whose answer ends later than `answer_s` after its arrival is unanswered. Raises
    AssertionError if an invariant of the simulation breaks."""
    machine = simulated_machine(host, slice_, arena, models, times)
    later_s = warm_up_s([model.spec.id for model in models])
    requests = [
        SimRequest(one.due_s + add_s, one.model, one.input_tokens, one.output_tokens)
        for every, add_s in ((warm, 0.0), (asked, later_s))
        for one in every
    ]
    scenario = Scenario("", "", WorkloadSettings(""), seed=seed, as_live=True)
    simulation = prepare(scenario, models, requests, machine)
    simulation.run()
    counted = [one for one in simulation.requests.ended if one.request.arrival_s >= later_s]
    counted.sort(key=lambda one: one.request.arrival_s)  # they end in another order
    answers = [_answer(one, answer_s) for one in counted]
    return Simulated(answers, sum(one.use.loads for one in simulation.slices.values()))


def _answer(tracked: TrackedRequest, answer_s: float) -> Answer:
    model, ttft_s = tracked.request.model, tracked.ttft_s if tracked.sampled else None
    match tracked.ending:
        case "rejected":
            return Answer(model, "refused", why=f"http {tracked.status}")
        case "finished" if tracked.last_s - tracked.request.arrival_s > answer_s:
            return Answer(model, "unanswered", ttft_s if (ttft_s or 0.0) <= answer_s else None)
        case "finished":
            tpot_s = tracked.tpot_s if tracked.sampled > 1 else None
            return Answer(model, "answered", ttft_s, tpot_s)
        case _:
            return Answer(model, "failed", ttft_s, why=tracked.ending)


def simulated_models(made: Pick) -> list[SimModel]:
    """Return the catalogue's models, in its order; a shape's name is that of its step times."""
    return [_model(entry.id, entry.shape, entry.layers) for entry in made.entries]


def _model(name: str, shape_name: str, layers: int) -> SimModel:
    config = config_of(shape_name, layers)
    weight_bytes = segment_bytes(plan_layout(config))
    shape = Shape(
        shape_name, weight_bytes // 2, config.layers, config.heads, config.kv_heads,
        config.head_dim, config.max_position, table=shape_name,
    )  # fmt: skip
    spec = replace(
        shape.spec(name), weight_bytes=weight_bytes, kv_block_bytes=config.kv_block_bytes, slo=SLO,
        pinned=True,
    )  # fmt: skip
    return SimModel(spec, shape)


def simulated_machine(
    host: Host, slice_: Slice, arena: Arena, models: Sequence[SimModel], times: Times | None
) -> SimMachine:
    """Return the machine with one slice. `times` None: steps take what `host.speeds` say.

    The slice is the server's own: KV and weights share its arena. Its policy knows the host's link.
    Weights that are lent come faster, which it learns. A CPU reads weights in the pool. Raises
    Refused."""
    speeds, links = host.speeds, dict[str, float]()
    if slice_.gpu is not None:
        links = dict(_links(host, arena, models))
        slice_ = replace(slice_, link=_H2D)
    shared = [name for name in links if name == _BOTH]
    simulated = SimulatedSlice(
        slice=slice_, node=slice_.id, flops=speeds.flops, hbm_bytes_per_s=speeds.hbm_bytes_per_s,
        load_bytes_per_s=links.get(_H2D, 0.0), step_s=speeds.step_s, table=DEVICE,
        h2d=(_H2D, *shared) if links else (), d2h=(_D2H, *shared) if links else (),
        host=None if times is None or slice_.gpu is None else times.host,
    )  # fmt: skip
    hardware = Hardware(
        name="weights_mix", source=speeds.source,
        pool_bytes=sum(model.spec.weight_bytes for model in models),
        disk_bytes_per_s=_DISK_BYTES_PER_S, host_links={}, devices=(),
        tables=Tables({}) if times is None else times.tables(),
        request_s=speeds.request_s if times is None else times.request_s,
    )  # fmt: skip
    return SimMachine(hardware, (simulated,), tuple(links.items()))


def _links(host: Host, arena: Arena, models: Sequence[SimModel]) -> Iterator[tuple[str, float]]:
    """Yield links and their speeds. What a neighbour lends has another way than the host's."""
    speeds = host.speeds
    if arena.lent_bytes and not speeds.peer_bytes_per_s:
        raise Refused(f"{speeds.source}: the speed of a neighbour's memory is not known")
    sizes = [model.spec.weight_bytes for model in models]
    ranked = list(zip(sizes, popularity(len(sizes)), strict=True))
    yield _H2D, weights_bytes_per_s(speeds, arena.lent_bytes, ranked)
    yield _D2H, speeds.d2h_bytes_per_s
    if not arena.lent_bytes:
        yield _BOTH, speeds.duplex_bytes_per_s
