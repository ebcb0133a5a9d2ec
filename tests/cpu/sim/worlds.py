"""Small random worlds: every kind of machine, preset, trouble and request, drawn from one seed."""

from random import Random

from c2cserve.core.request import Slo
from c2cserve.policy.baselines.presets import PRESETS
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.sim.recording import Recorders, no_recorders
from c2cserve.sim.world.faults import Fault, LinkFault, SliceFault
from c2cserve.sim.world.hardware import SliceSettings, build
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import SimModel, catalogue, interleaved
from c2cserve.sim.world.simulation import Settings, Simulation

MACHINES = ("a100x4+xeon6462cx4", "h200-x1", "h200-x2:green2", "gh200:mig7", "gh200:mig3")
LONGEST_S = 3600.0
"""No world's requests take so long, as they come within a minute or so."""
SHAPES = ("llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "llama-3.1-8b")


def requests(random: Random, models: list[SimModel], count: int, rate: float) -> list[SimRequest]:
    now = 0.0
    made: list[SimRequest] = []
    for number in range(count):
        now += random.expovariate(rate)
        model = random.choice(models).spec.id
        prompt = random.choice((1, 16, 33, 500, 3000))
        shared = random.randrange(prompt // 16 + 1)
        hashes = (*range(shared), *range(10**6 * (number + 1), 10**6 * (number + 1) + prompt // 16))
        made.append(SimRequest(now, model, prompt, random.randint(1, 60), hashes[: prompt // 16]))
    return made


def faults(random: Random, slices: list[str], links: list[str]) -> tuple[Fault, ...]:
    drawn: list[Fault] = []
    if random.random() < 0.5:
        drawn.append(SliceFault(random.choice(slices), random.uniform(0, 8), random.uniform(0, 4)))
    if random.random() < 0.5:
        drawn.append(LinkFault(random.choice(links), random.uniform(0, 8), 3.0, 0.25))
    return tuple(drawn)


def world(seed: int, preset: str | None = None, recorders: Recorders = no_recorders) -> Simulation:
    random = Random(seed)
    chosen = PRESETS[preset or random.choice(sorted(PRESETS))]
    small = random.random() < 0.3
    settings = SliceSettings(
        kv_share=0.02 if small else random.choice((0.3, 0.5)),
        max_batch=random.choice((1, 4, 64)),
        max_step_tokens=random.choice((16, 256, 2048)),
        max_active=random.choice((1, 2, 8)),
    )
    # Small parts cannot hold all weights of a model.
    machines = MACHINES if chosen.streams else MACHINES[:3]
    machine = build(random.choice(machines), settings, chosen)
    terms = (f"{random.choice(SHAPES)}*{random.randint(1, 5)}" for _ in range(2))
    models = interleaved(catalogue(",".join(terms)))
    count, rate = random.randint(1, 60), random.choice((1.0, 10.0))
    made = Simulation(
        machine,
        models,
        requests(random, models, count, rate),
        lambda prompt: Slo(random.choice((0.5, 2.0)), 0.1, excuses_loads=seed % 3 == 0),
        Settings(
            preset=chosen,
            seed=seed,
            noise=random.choice((0.0, 0.1)),
            cold_pool=random.random() < 0.3,
            hybrid=random.random() < 0.3,
            faults=faults(
                random,
                [simulated.slice.id for simulated in machine.slices],
                [i for i, _ in machine.links],
            ),
            as_live=chosen.name == "c2cserve" and random.random() < 0.5,
        ),
        recorders,
    )
    made.timeline.at(LONGEST_S, _too_long)
    return made


def _too_long() -> None:
    raise AssertionError("requests wait for ever")


def crowded(seed: int) -> Simulation:
    """SLINFER with more and longer prompts than its machine can compute."""
    random = Random(seed)
    batch, active = random.choice((8, 64)), random.choice((4, 8))
    slices = SliceSettings(kv_share=1.0, max_batch=batch, max_step_tokens=4096, max_active=active)
    machine = build(random.choice((MACHINES[1], MACHINES[0])), slices, PRESETS["slinfer"])
    models = catalogue(f"llama-3.1-8b*{random.choice((9, 12, 16))}")
    asked: list[SimRequest] = []
    now = 0.0
    for _ in range(150):
        now += random.expovariate(12.0)
        model, prompt = random.choice(models), random.choice((100, 2_000, 12_000, 30_000))
        asked.append(SimRequest(now, model.spec.id, prompt, random.randint(1, 150)))
    admission = AdmissionSettings(max_waiting=1_000_000, patience=1.0, foresee=False)
    settings = Settings(PRESETS["slinfer"], admission, seed, noise=0.05)
    return Simulation(
        machine, models, asked, lambda prompt: Slo(max(0.5, prompt / 512), 0.25), settings
    )


def check_end(simulation: Simulation) -> None:
    """What must be so when all is over."""
    ended = simulation.requests.ended
    assert len(ended) == simulation.arrived
    assert len({tracked.request.id for tracked in ended}) == len(ended)
    assert not simulation.requests.live
    for tracked in ended:
        assert tracked.ending
        if tracked.ending == "finished":
            assert tracked.sampled == tracked.output
            assert tracked.request.arrival_s <= tracked.first_s <= tracked.last_s
        else:
            assert tracked.sampled < tracked.output
    for one in (*simulation.slices.values(), *simulation.lost):
        streamed = one.use.streamed_bytes
        assert simulation.settings.preset.streams or not streamed, "its weights were loaded before"
    for one in simulation.slices.values():
        assert not one.seqs
        assert one.book.held_bytes == 0
        assert not one.book.sharers
        assert not any(one.book.held)
        assert one.policy.arena.held_bytes == 0
    for link in simulation.network.links.values():
        assert link.moved_bytes <= link.nominal_bytes_per_s * simulation.timeline.now * (1 + 1e-6)
