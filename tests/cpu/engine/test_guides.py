"""Outputs that are held to grammars: in any batch, with steps that overlap, and after a resume."""

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lane import LateModel
from late import LateOps
from policy_loop import GRAMMARS, PolicyLoop, hashes, models

from c2cserve.core.request import FinishReason, Grammar, Job, Request, Sampling
from c2cserve.grammars import outputs, write
from c2cserve.grammars.matching import GrammarFailed, Matchers, Vocabulary
from c2cserve.grammars.table import read_table, write_table

__all__ = ["models"]

ENDS = (2,)
ALPHABET = b"abcdefghijklmnopqrstuvwxyz0123456789"
PATTERNS = ["[a-f]{1,9}", "(ab|cd)*[0-9]{3}", "x[a-z]*", "[0-9]+(a|b)"]
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tokens of the small models: three special ones, letters, and pairs of letters."""
    singles = [bytes([one]) for one in ALPHABET]
    pairs = [a + b for a in singles for b in singles]
    tokens = [b""] * 3 + (singles + pairs)[:157]
    return write_table(str(tmp_path_factory.mktemp("table") / "run"), tokens)


def guided(name: str, model: str, table: str, pattern: str, **how: float) -> Job:
    prompt = [17, 23, 42, 5, 99 + len(name), *(ord(one) % 150 + 3 for one in name)]
    grammar = Grammar(write.grammar_of(write.regex(pattern)), table, ENDS)
    request = Request(name, model, len(prompt), 14, 0.0, prefix_hashes=hashes(prompt))
    sampling = Sampling(seed=len(prompt), stop_token_ids=ENDS, grammar=grammar)
    return Job(request, tuple(prompt), replace(sampling, **how))  # pyright: ignore[reportArgumentType]


def free(name: str, model: str) -> Job:
    prompt = [7, 9, 11, *(ord(one) % 150 + 3 for one in name)]
    request = Request(name, model, len(prompt), 10, 0.0, prefix_hashes=hashes(prompt))
    return Job(request, tuple(prompt), Sampling(seed=3, temperature=0.9))


def alone(models: dict[str, LateModel], one: Job) -> tuple[list[int], FinishReason | None]:
    world = PolicyLoop(models, 64, 512)
    world.submit(one)
    while not world.ended(one.request.id):
        world.tick()
    return world.tokens(one.request.id), world.ended(one.request.id)


def text_of(table: str, tokens: list[int]) -> str:
    raw = read_table(table)
    return b"".join(raw[token] for token in tokens).decode()


@settings(max_examples=examples(40), deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_the_same_output_in_any_batch_and_with_overlapping_steps(
    models: dict[str, LateModel], table: str, data: st.DataObject
) -> None:
    late = data.draw(st.sampled_from([None, LateOps()]), "late")
    world = PolicyLoop(models, data.draw(st.integers(8, 24)), 64, late)
    jobs: dict[str, Job] = {}
    patterns: dict[str, str] = {}
    for i in range(data.draw(st.integers(1, 7), "requests")):
        model = data.draw(st.sampled_from(sorted(models)))
        if data.draw(st.integers(0, 2)):
            name = f"g{i}"
            patterns[name] = data.draw(st.sampled_from(PATTERNS))
            how: dict[str, float] = data.draw(st.sampled_from([
                {"temperature": 0.0}, {"temperature": 2.0}, {"temperature": 1.0, "top_k": 3},
                {"presence_penalty": 0.5}, {"min_tokens": 6}, {"logprobs": 2, "temperature": 5.0},
            ]))  # fmt: skip
            jobs[name] = guided(name, model, table, patterns[name], **how)
        else:
            jobs[f"f{i}"] = free(f"f{i}", model)
    for one in jobs.values():
        world.submit(one)
        for _ in range(data.draw(st.integers(0, 4))):
            world.tick()
            if late is not None:
                late.finish(data.draw(st.integers(0, 2)))
    for _ in range(2000):
        world.tick()
        if late is not None:
            late.finish()
        if all(world.ended(name) for name in jobs):
            break
    for name, one in jobs.items():
        tokens, finish = world.tokens(name), world.ended(name)
        assert (tokens, finish) == alone(models, one)
        if name in patterns and finish is FinishReason.STOP:
            assert tokens[-1] in ENDS
            assert re.fullmatch(patterns[name], text_of(table, tokens))


def test_a_step_is_launched_before_the_token_that_its_mask_depends_on_is_known(
    models: dict[str, LateModel], table: str
) -> None:
    late = LateOps()
    world = PolicyLoop(models, 64, 512, late)
    world.submit(guided("g", "llama", table, "[a-z]{40}"))
    world.submit(free("f", "llama"))
    for _ in range(6):
        world.tick()
        late.finish()
    begun = world.computed
    world.tick()
    world.tick()
    assert world.computed > begun, "the next step does not wait for this one"
    assert len(late.samples) == 1, "only its sample does"
    assert late.awaited == 0


def test_it_continues_exactly_on_another_slice(models: dict[str, LateModel], table: str) -> None:
    one = guided("g", "llama", table, "[a-f]{9}[0-9]{2}", temperature=3.0)
    whole, finish = alone(models, one)
    assert len(whole) > 4
    for sent in range(1, len(whole)):
        request = replace(
            one.request, sent=sent, prompt_len=one.request.prompt_len + sent,
            max_new_tokens=one.request.max_new_tokens - sent,
        )  # fmt: skip
        rest = Job(request, (*one.tokens, *whole[:sent]), one.sampling)
        assert alone(models, rest) == (whole[sent:], finish)


def test_min_tokens_yield_to_the_end_of_a_grammar(models: dict[str, LateModel], table: str) -> None:
    tokens, finish = alone(models, guided("g", "llama", table, "[a-c]{2}", min_tokens=9))
    assert finish is FinishReason.STOP
    assert re.fullmatch("[a-c]{2}", text_of(table, tokens))


def test_a_grammar_that_cannot_go_on_fails_its_request_alone(
    models: dict[str, LateModel], table: str
) -> None:
    """No token of the vocabulary is in the alphabet of the grammar."""
    world = PolicyLoop(models, 64, 512)
    world.submit(guided("bad", "llama", table, "[A-Z]{3}"))
    world.submit(free("good", "llama"))
    for _ in range(40):
        world.tick()
    assert world.ended("bad") is FinishReason.ERROR
    assert world.ended("good") is FinishReason.LENGTH
    assert world.guides.failed == 1


def test_requests_whose_masks_are_late_hold_up_no_other(
    models: dict[str, LateModel], table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait until their process answers, and go on with the tokens that they would have had."""
    one = guided("g", "llama", table, "[a-f]{9}[0-9]{2}", temperature=3.0)
    whole, finish = alone(models, one)
    monkeypatch.setattr(outputs, "_STEP_PATIENCE_S", 0.1)
    world = PolicyLoop(models, 64, 512)
    world.submit(one)
    while len(world.tokens("g")) < 3:
        world.tick()
    (pid,) = [one.pid for one in GRAMMARS.running() if one.live]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        others = [free("f", "llama"), free("h", "qwen3-moe")]
        for other in others:
            world.submit(other)
        began_s = time.monotonic()
        while not all(world.ended(other.request.id) for other in others):
            world.tick()
        assert time.monotonic() - began_s < 10.0
        assert not world.ended("g")
        assert world.guides.waited == 1
        assert not world.executor.poll().prepared
    finally:
        os.kill(pid, signal.SIGCONT)
    while not (prepared := world.executor.poll().prepared):
        pass
    world.submit(*prepared)
    while not world.ended("g"):
        world.tick()
    assert (world.tokens("g"), world.ended("g")) == (whole, finish)


def test_what_was_sent_must_fit_the_grammar(table: str) -> None:
    grammar = Grammar(write.grammar_of(write.regex("a+")), table, ENDS)
    with pytest.raises(GrammarFailed):
        Matchers(Vocabulary(table, 160, ENDS), 1).matcher(grammar.text, [3, 4])


def test_a_prepared_request_is_named_when_its_grammar_is_built(
    models: dict[str, LateModel], table: str
) -> None:
    world = PolicyLoop(models, 64, 512)
    one, other = guided("one", "llama", table, "a+"), guided("other", "llama", table, "b+")
    assert world.executor.prepare(free("f", "llama"))
    assert not world.executor.prepare(one)
    assert not world.executor.prepare(other)
    world.executor.forget("other")
    while not (prepared := world.executor.poll().prepared):
        pass
    assert prepared == [one]
    world.submit(one)
    assert not world.executor.poll().prepared


def test_tables_of_equal_vocabularies_are_one_file(tmp_path: Path) -> None:
    first, second = (write_table(str(tmp_path / "run"), [b"a", b"b"]) for _ in range(2))
    other = write_table(str(tmp_path / "run"), [b"a", b"c"])
    assert first == second != other
    assert read_table(first) == [b"a", b"b"]
    assert len(list(tmp_path.iterdir())) == 2
