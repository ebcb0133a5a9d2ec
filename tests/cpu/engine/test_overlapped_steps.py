"""Steps that overlap: what is drawn is known a step late, and nobody's text changes by that."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_reports import EngineReports
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lane import GREEDY, LateModel
from late import LateOps
from policy_loop import SHARED, PolicyLoop, hashes, job, models
from tiny import make_checkpoint

from c2cserve.core.actions import Drop, RunStep
from c2cserve.core.events import SeqOutcome, StepDone, StepFailed, StepParked
from c2cserve.core.request import FinishReason, Job, Request, Sampling
from c2cserve.core.step import SeqStep, Step
from c2cserve.engine.cpu.arena import make_arena
from c2cserve.engine.executor import Executor

__all__ = ["models"]

PROMPT = [17, 23, 42, 5, 99, 101, 7]


def chained(
    name: str, model: str, prompt: list[int], new: int, *stops: int, heat: float = 0.0
) -> Job:
    request = Request(name, model, len(prompt), new, 0.0, prefix_hashes=hashes(prompt))
    sampling = Sampling(seed=len(prompt), temperature=heat, top_p=0.9, stop_token_ids=stops)
    return Job(request, tuple(prompt), sampling)


def alone(models: dict[str, LateModel], one: Job) -> tuple[list[int], FinishReason | None]:
    world = PolicyLoop(models, 64, 512)
    world.submit(one)
    name = one.request.id
    while not world.ended(name):
        world.tick()
    return world.tokens(name), world.ended(name)


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_everyone_gets_the_text_of_an_idle_slice_without_overlap(
    models: dict[str, LateModel], data: st.DataObject
) -> None:
    late = LateOps()
    blocks = data.draw(st.integers(8, 24), "blocks")
    world = PolicyLoop(models, blocks, data.draw(st.sampled_from([16, 40, 512]), "chunk"), late)
    jobs: dict[str, Job] = {}
    for i in range(data.draw(st.integers(1, 8), "requests")):
        shared = SHARED[: data.draw(st.sampled_from([0, 16, 32]))]
        prompt = shared + data.draw(st.lists(st.integers(3, 159), min_size=1, max_size=30))
        name, model = f"r{i}", data.draw(st.sampled_from(sorted(models)))
        if data.draw(st.integers(0, 3)):
            stops = data.draw(st.sets(st.integers(0, 159), max_size=20), "stops")
            new, heat = data.draw(st.integers(1, 24)), data.draw(st.sampled_from([0.0, 1.2]))
            jobs[name] = chained(name, model, prompt, new, *sorted(stops), heat=heat)
        else:
            jobs[name] = job(name, model, prompt)
    gone = data.draw(st.sets(st.sampled_from(sorted(jobs))), "leave")
    for name in jobs:
        world.submit(jobs[name])
        for _ in range(data.draw(st.integers(0, 6))):
            world.tick()
            late.finish(data.draw(st.integers(0, 2)))
    for name in gone:
        world.withdraw(name)
    for _ in range(3000):
        world.tick()
        late.finish()
        if not late.samples and all(world.ended(name) for name in jobs if name not in gone):
            break
    for name in jobs.keys() - gone:
        assert (world.tokens(name), world.ended(name)) == alone(models, jobs[name])
    for _ in range(4):
        late.finish()
        world.tick()
    assert late.awaited == 0, "the policy plans nothing that has to wait"
    assert len(world.executor) == 0, "nothing is kept for those who left"
    assert world.policy.arena.held_bytes == 0


def test_a_stop_costs_one_step_and_a_limit_none(models: dict[str, LateModel]) -> None:
    text, _ = alone(models, chained("a", "llama", PROMPT, 12))
    last = max(i for i, token in enumerate(text[:10]) if text.index(token) == i)
    assert last > 1
    for one, rows in (
        (chained("a", "llama", PROMPT, 12, text[last]), last + 2),
        (chained("a", "llama", PROMPT, last + 1), last + 1),
    ):
        late = LateOps()
        world = PolicyLoop(models, 64, 512, late)
        world.submit(one)
        drawn = 0
        while not world.ended("a") or late.samples:
            before = len(late.samples)
            world.tick()
            drawn += len(late.samples) - before
            late.finish()
        assert world.tokens("a") == text[: last + 1]
        assert drawn == rows


class Bench(EngineReports):
    """An executor with late operators and one model, driven step by step."""

    def __init__(
        self, model: LateModel, fatal: type[Exception] = ZeroDivisionError,
        renew: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ops = LateOps()
        self.now = 0.0
        self.executor = Executor(
            "s", self.ops, make_arena(1 << 20), self.report, lambda: self.now,
            fatal=lambda fault: isinstance(fault, fatal), renew=renew,
        )  # fmt: skip
        self.executor.attach("m", model.decoder)
        self._block = model.config.kv_block_bytes
        self._made = 0

    def add(self, name: str, sampling: Sampling = GREEDY, new: int = 9) -> bool:
        request = Request(name, "m", len(PROMPT), new, 0.0)
        return self.executor.add(Job(request, tuple(PROMPT), sampling))

    def step(self, *parts: tuple[str, int, int]) -> int:
        """(request, start, tokens): each has the block of its name's letter."""
        self._made += 1
        seqs = tuple(
            SeqStep(
                name, start, tokens, ((ord(name[0]) - 97) * self._block,) if not start else (),
                not start, start + tokens >= len(PROMPT),
            )
            for name, start, tokens in parts
        )  # fmt: skip
        self.executor.submit(RunStep(Step(self._made, "m", seqs)))
        return self._made

    def land(self, count: int = 1) -> None:
        self.ops.finish(count)
        self.executor.poll()

    def done(self) -> list[StepDone]:
        return [event for event in self.events if isinstance(event, StepDone)]


@pytest.fixture
def bench(models: dict[str, LateModel]) -> Bench:
    return Bench(models["llama"])


def test_which_requests_are_chained(bench: Bench) -> None:
    assert bench.add("a")
    assert bench.add("b", Sampling(seed=1, temperature=0.7, top_p=0.5, top_k=9, min_p=0.1))
    assert not bench.add("d", Sampling(seed=1, temperature=0.7, frequency_penalty=0.2))
    assert not bench.add("c", Sampling(seed=1, temperature=0.0, logprobs=2))


def test_steps_are_completed_in_order_and_take_the_time_between_their_ends(bench: Bench) -> None:
    bench.add("a")
    first = bench.step(("a", 0, 7))
    bench.now = 1.0
    second = bench.step(("a", 7, 1))
    assert not bench.events
    bench.now = 3.0
    bench.land()
    assert [done.step_id for done in bench.done()] == [first]
    bench.now = 5.0
    bench.land()
    assert [(done.step_id, done.compute_s) for done in bench.done()] == [
        (first, 3.0), (second, 2.0),
    ]  # fmt: skip
    third = bench.step(("a", 8, 1))
    bench.now = 6.5
    bench.land()
    assert (bench.done()[-1].step_id, bench.done()[-1].compute_s) == (third, 1.5)
    assert bench.ops.awaited == 0


def test_an_ended_request_s_surplus_token_is_nobody_s(bench: Bench) -> None:
    bench.add("a")
    bench.step(("a", 0, 7))
    bench.land()
    [stop] = bench.tokens("a")
    bench.add("b", Sampling(seed=0, temperature=0.0, stop_token_ids=(stop,)))
    bench.add("c")
    bench.step(("b", 0, 7), ("c", 0, 7))
    bench.step(("b", 7, 1), ("c", 7, 1))
    bench.land(2)
    assert bench.tokens("b") == [stop]
    assert bench.done()[1].outcomes == (SeqOutcome("b", 1, True), SeqOutcome("c", 1, False))
    assert bench.done()[2].outcomes == (SeqOutcome("c", 1, False),)
    assert len(bench.tokens("c")) == 2


def test_a_draw_that_is_lost_fails_its_step_and_what_read_it(bench: Bench) -> None:
    bench.add("a")
    bench.add("b")
    bench.step(("a", 0, 7))
    bench.step(("a", 7, 1))
    bench.ops.samples[0].fault = RuntimeError("a copy went wrong")
    bench.land(2)
    first, second = bench.events
    assert isinstance(first, StepFailed)
    assert "a copy went wrong" in first.reason
    assert isinstance(second, StepDone)
    assert second.outcomes == ()
    assert not bench.deltas
    bench.step(("b", 0, 7))
    bench.land()
    assert len(bench.tokens("b")) == 1


def test_a_step_that_can_not_be_launched_fails_after_those_before_it(bench: Bench) -> None:
    bench.add("a")
    bench.add("b")
    bench.step(("a", 0, 7), ("b", 0, 7))
    bench.executor.detach("m")
    bench.step(("a", 7, 1))
    bench.step(("a", 8, 1))
    good, bad, empty = bench.events
    assert isinstance(good, StepDone)
    assert good.outcomes == (SeqOutcome("a", 1, False), SeqOutcome("b", 1, False))
    assert isinstance(bad, StepFailed)
    assert isinstance(empty, StepDone)
    assert empty.outcomes == ()
    assert len(bench.executor) == 2


def test_parts_are_built_anew_before_anything_else_runs(models: dict[str, LateModel]) -> None:
    told: list[int] = []
    bench = Bench(models["llama"], renew=lambda: told.append(len(bench.events)))
    bench.add("a")
    bench.step(("a", 0, 7))
    bench.ops.samples[0].fault = RuntimeError("a copy went wrong")
    bench.land()
    assert (told, len(bench.events)) == ([0], 1)
    bench.step(("a", 7, 1))
    assert len(bench.ops.samples) == 0, "what begins where it was is left out"
    bench.step(("a", 0, 7))
    bench.land()
    assert len(bench.tokens("a")) == 1


def test_a_fatal_draw_is_raised(models: dict[str, LateModel]) -> None:
    class Lost(RuntimeError):
        pass

    bench = Bench(models["llama"], fatal=Lost)
    bench.add("a")
    bench.step(("a", 0, 7))
    bench.ops.samples[0].fault = Lost()
    with pytest.raises(Lost):
        bench.land()


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1, presence_penalty=0.2)])
def test_what_can_not_be_read_from_one_draw_is_waited_for(bench: Bench, sampling: Sampling) -> None:
    """Whatever is planned, the text is right."""
    for name in "ab":
        bench.add(name, sampling)
        bench.step((name, 0, 7))
        for at in range(7, 10):
            bench.step((name, at, 1))
        bench.land(9)
    for name in "cd":
        bench.add(name, sampling)
        bench.step((name, 0, 7))
    bench.step(("c", 7, 1), ("d", 7, 1))
    bench.step(("c", 8, 1), ("d", 8, 1))
    bench.land(9)
    bench.land(9)
    assert bench.tokens("c") == bench.tokens("d") == bench.tokens("a")[:3] == bench.tokens("b")[:3]


def test_a_request_that_goes_meanwhile_gets_nothing_more(bench: Bench) -> None:
    bench.add("a")
    bench.step(("a", 0, 7))
    bench.executor.submit(Drop("a"))
    bench.land()
    assert not bench.deltas
    assert bench.done()[0].outcomes == ()


def test_prompt_scores_of_chunks_that_overlap(bench: Bench) -> None:
    scored = Sampling(seed=0, temperature=0.0, prompt_logprobs=1)
    for name, late in (("a", False), ("b", True)):
        bench.add(name, scored)
        bench.step((name, 0, 3))
        if not late:
            bench.land()
        bench.step((name, 3, 4))
        bench.land(2)
    first, second = bench.deltas
    assert len(first.prompt_logprobs) == len(PROMPT) - 1
    assert first.prompt_logprobs == second.prompt_logprobs


def test_a_step_behind_a_parked_one_waits_with_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    cold = LateModel(tmp_path)
    bench = Bench(cold)
    for name in "ab":
        bench.add(name)
    first, second = bench.step(("a", 0, 7)), bench.step(("a", 7, 1), ("b", 0, 7))
    assert bench.events == [StepParked(first), StepParked(second)]
    cold.load_all()
    bench.executor.poll()
    bench.land(2)
    assert [done.step_id for done in bench.done()] == [first, second]
    bench.step(("b", 7, 1))
    bench.land()
    assert bench.tokens("a") == bench.tokens("b")
    assert len(bench.tokens("a")) == 2
