"""What an executor counts of the time of its steps, with a clock that operators move."""

from pathlib import Path

import pytest
from engine_reports import EngineReports
from lane import GREEDY, LateModel
from late import LateOps
from tiny import make_checkpoint

from c2cserve.core.actions import RunStep
from c2cserve.core.request import Job, Request, Sampling
from c2cserve.core.step import SeqStep, Step
from c2cserve.engine.cpu.arena import make_arena
from c2cserve.engine.executor import Executor

PROMPT = (17, 23, 42)
LAUNCH_S, AWAITED_S, REPORT_S = 1.0, 16.0, 0.25
PENALTY = Sampling(seed=0, temperature=0.0, frequency_penalty=0.2)
"""The next step needs its tokens on the host."""


class Clocked(EngineReports):
    """An executor of two models. Sampling ends a launch, which takes a second."""

    def __init__(self, model: LateModel, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now, self.made, self.ops = 0.0, 0, LateOps()
        launched = self.ops.sample

        def sample(*given: object) -> object:
            self.now += LAUNCH_S
            return launched(*given)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(self.ops, "sample", sample)
        self.executor = Executor(
            "s", self.ops, make_arena(1 << 20), self._reported, lambda: self.now
        )
        for name in "mn":
            self.executor.attach(name, model.decoder)
        self._block = model.config.kv_block_bytes

    def _reported(self, *given: object) -> None:
        self.now += REPORT_S
        self.report(*given)  # pyright: ignore[reportArgumentType]

    def add(self, name: str, model: str, sampling: Sampling = GREEDY) -> None:
        request = Request(name, model, len(PROMPT), 9, 0.0)
        self.executor.add(Job(request, PROMPT, sampling))

    def step(self, name: str, model: str, start: int, tokens: int) -> None:
        self.made += 1
        blocks = ((ord(name) - 97) * self._block,) if not start else ()
        part = SeqStep(name, start, tokens, blocks, not start, True)
        self.executor.submit(RunStep(Step(self.made, model, (part,))))

    def land(self) -> None:
        self.ops.finish(1)
        self.executor.poll()


@pytest.fixture
def clocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clocked:
    make_checkpoint(tmp_path, "llama")
    return Clocked(LateModel(tmp_path).load_all(), monkeypatch)


def test_steps_are_counted_by_kind(clocked: Clocked) -> None:
    for name, model in ("am", "bn"):
        clocked.add(name, model)
        clocked.step(name, model, 0, 3)
        clocked.land()
    for name, model in ("am", "am", "bn", "bn", "bn"):
        start = 3 + sum(delta.request_id == name for delta in clocked.deltas) - 1
        clocked.step(name, model, start, 1)
        clocked.land()
    costs = clocked.executor.costs
    assert costs.steps == {"prefill": 2, "switched": 2, "decode": 3}
    assert costs.launch_s == {"prefill": 2.0, "switched": 2.0, "decode": 3.0}
    assert costs.completion_s == {"prefill": 0.5, "switched": 0.5, "decode": 0.75}
    assert clocked.executor.compute_seconds() == costs.launch_s, "these end when they are launched"
    assert costs.wait_s == 0.0


def test_what_an_earlier_step_takes_is_not_the_next_ones(
    clocked: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step needs the first one's token on the host: it waits, and reports that first."""
    clocked.add("a", "m", PENALTY)
    clocked.step("a", "m", 0, 3)
    [awaited] = clocked.ops.samples
    collect = type(awaited).collect

    def slow(sample: object) -> object:
        clocked.now += AWAITED_S
        return collect(sample)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(type(awaited), "collect", slow)
    clocked.step("a", "m", 3, 1)
    costs = clocked.executor.costs
    assert costs.wait_s == AWAITED_S
    assert costs.completion_s["prefill"] == REPORT_S
    assert costs.batch_s == {"prefill": 0.0, "switched": 0.0, "decode": 0.0}
    assert costs.launch_s == {"prefill": LAUNCH_S, "switched": 0.0, "decode": LAUNCH_S}
