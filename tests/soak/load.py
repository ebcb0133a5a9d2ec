"""The stream of requests: waves of 0 to 300 at a time, in moods that change without warning."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from soak.case import Case
from soak.catalogue import Model
from soak.client import Client
from soak.comparing import EXACT_ROWS, Asked
from soak.judge import Judge
from soak.kinds import BANK, CALM, CALM_PROMPT, KINDS, Kind, Limits, Sampler

_FAMILIES = 3
_FROM_BANK = 0.4
_CALM_SHARE = 0.15
_LINGER_S = 3.0
"""How long what a client has left may still be computed."""
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Wave:
    name: str
    weight: float
    at_once: tuple[int, int]
    lasts_s: tuple[float, float]
    size: str = "any"
    models: int | None = None
    """How many of them are asked; None: all."""


WAVES = (
    Wave("lull", 1, (0, 1), (0.5, 2)),
    Wave("quiet", 3, (1, 4), (2, 6)),
    Wave("steady", 4, (8, 32), (3, 8)),
    Wave("one model", 2, (8, 64), (2, 5), models=1),
    Wave("two models", 2, (8, 64), (2, 5), models=2),
    Wave("long ones", 2, (4, 24), (2, 5), "long"),
    Wave("short ones", 2, (32, 100), (2, 5), "short"),
    Wave("burst", 1.5, (100, 300), (1, 3), "short"),
)


_ANY = Wave("any", 0, (0, 0), (0, 0))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the machine can be asked for."""

    limits: Limits
    work: int
    """Tokens in flight, as `Case.work` counts them."""
    at_once: int = 300


@dataclass(slots=True)
class _Active:
    model: str
    rows: int = 0
    """Of all requests of its model at a time, the most so far."""


class Load:
    def __init__(
        self, client: Client, models: Sequence[Model], judge: Judge,
        rng: random.Random, bounds: Bounds, name: str,
    ) -> None:  # fmt: skip
        """`name` begins the ids of all requests."""
        self._client, self._judge = client, judge
        self._rng, self._bounds, self.name = rng, bounds, name
        self._models = list(models)
        numbers = [model for model in models if model.numbers]
        self._calm = rng.sample(numbers, min(2, len(numbers) - 1))
        self.extras: list[Model] = []
        """Models that were added while serving."""
        self.bank: list[Case] = []
        self.asked: list[Asked] = []
        self._active: dict[str, _Active] = {}
        self._rows: Counter[str] = Counter()
        self._work = 0
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def active(self) -> int:
        return len(self._active)

    # ---- what is asked --------------------------------------------------------------------------

    def make_bank(self, each: int, kinds: Sequence[str] = BANK) -> list[Case]:
        """Questions that come again and again: `each` of every model."""
        by_name = {kind.name: kind for kind in KINDS}
        for model in self._models:
            calm = model in self._calm
            fitting = [by_name[name] for name in kinds if by_name[name].fits(model)]
            for i in range(each):
                kind = CALM if calm else fitting[i % len(fitting)]
                self.bank.append(kind.make(self._draw(model), kind.name))
        self._rng.shuffle(self.bank)
        return self.bank

    def _draw(self, model: Model) -> Sampler:
        return Sampler(self._rng, model, self._bounds.limits, _FAMILIES)

    def _next(self, wave: Wave, models: Sequence[Model]) -> Case:
        if self._rng.random() < _CALM_SHARE and (case := self._next_calm()) is not None:
            return case
        if self._rng.random() < _FROM_BANK:
            allowed = {model.id for model in models}
            some = self._rng.sample(self.bank, min(8, len(self.bank)))
            for case in some:
                assert case.model is not None
                if case.model not in self._calm and case.model.id in allowed:
                    return self._again(case)
        model = self._rng.choice(models)
        kinds = [kind for kind in KINDS if kind.fits(model)]
        weights = [_weight(kind, wave) for kind in kinds]
        kind = self._rng.choices(kinds, weights)[0]
        return kind.make(self._draw(model), kind.name)

    def _next_calm(self) -> Case | None:
        """One more request of a model that is kept to small steps, if it has room."""
        model = self._rng.choice(self._calm)
        if self._rows[model.id] + CALM_PROMPT > EXACT_ROWS:
            return None
        known = [case for case in self.bank if case.model is model]
        if known and self._rng.random() < 0.5:
            return self._again(self._rng.choice(known))
        return CALM.make(self._draw(model), CALM.name)

    def _again(self, case: Case) -> Case:
        """The same question, perhaps of another way to be answered."""
        body = {n: v for n, v in case.body.items() if n not in ("stream", "stream_options")}
        if self._rng.random() < 0.6:
            body["stream"] = True
        if self._rng.random() < 0.2:
            body["priority"] = self._rng.randint(-5, 5)
        return replace(case, body=body)

    # ---- asking ---------------------------------------------------------------------------------

    async def run(self, until_s: float, note: Callable[[Wave], None]) -> None:
        """Waves until then; afterwards all answers are awaited."""
        while (now := time.monotonic()) < until_s:
            wave = self._rng.choices(WAVES, [wave.weight for wave in WAVES])[0]
            note(wave)
            most = min(self._rng.randint(*wave.at_once), self._bounds.at_once)
            models = self._wave_models(wave)
            end_s = min(until_s, now + self._rng.uniform(*wave.lasts_s))
            while time.monotonic() < end_s:
                while self.active < most and self._work < self._bounds.work:
                    self._start(self._next(wave, [*models, *self.extras]))
                await asyncio.sleep(_LOOK_S)
        await self.finish()

    def _wave_models(self, wave: Wave) -> list[Model]:
        loud = [model for model in self._models if model not in self._calm]
        return loud if wave.models is None else self._rng.sample(loud, min(wave.models, len(loud)))

    async def some(self, count: int) -> None:
        """So many requests at once, until all have ended."""
        for _ in range(count):
            self._start(self._next(_ANY, self._models))
        await self.finish()

    async def late(self, count: int) -> None:
        """So many that come while the server drains. Once it is gone there is no connection."""
        for _ in range(count):
            case = self._next(_ANY, self._models)
            case = replace(case, id=f"{self.name}-late-{self._number}", leave=None)
            reply = await self._client.ask(case)
            if reply.end not in ("no connection", "cut"):
                self._judge.judge(case, reply)
            await asyncio.sleep(_LOOK_S)

    async def finish(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def _start(self, case: Case) -> None:
        self._number += 1
        case = replace(case, id=f"{self.name}-{self._number}")
        model = case.model.id if case.model is not None else ""
        rows = sum(case.prompt_lens) * int(case.body.get("n") or 1) or EXACT_ROWS + 1
        self._rows[model] += rows
        self._work += case.work
        self._active[case.id] = _Active(model)
        for one in self._active.values():
            if one.model == model:
                one.rows = max(one.rows, self._rows[model])
        task = asyncio.create_task(self._ask(case, model, rows))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, case: Case, model: str, rows: int) -> None:
        reply = await self._client.ask(case)
        mine = self._active.pop(case.id)
        self._work -= case.work
        linger_s = _LINGER_S if reply.end == "left" else 0.0
        asyncio.get_running_loop().call_later(linger_s, self._rows.subtract, {model: rows})
        self._judge.judge(case, reply)
        self.asked.append(Asked(case, reply, mine.rows))


def _weight(kind: Kind, wave: Wave) -> float:
    if wave.size == "any" or kind.size == "any":
        return kind.weight
    return kind.weight * (10.0 if kind.size == wave.size else 0.1)
