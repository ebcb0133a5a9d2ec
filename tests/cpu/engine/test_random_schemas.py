"""Answers of small trained models to random schemas: none is invalid, and most are complete."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from lane import LateModel
from policy_loop import PolicyLoop
from random_schemas import conforms, random_schema

from c2cserve.core.request import FinishReason, Grammar, Job, Request, Sampling
from c2cserve.grammars import write
from c2cserve.grammars.matching import GrammarFailed, Matchers, Vocabulary
from c2cserve.grammars.table import write_table
from c2cserve.server.text.tokenizer import Tokenizer

SPECIALISTS = Path(__file__).parents[3] / "examples" / "specialists"
ENDS = (2, 6)
AT_ONCE = 24
LONGEST = 300


class Small:
    """A specialist on a CPU slice."""

    def __init__(self, directory: Path, name: str) -> None:
        folder = Path(shutil.copytree(SPECIALISTS / name, directory / name))
        self.name = name
        self.tokenizer = Tokenizer(folder)
        self.model = LateModel(folder, 512).load_all()
        raw = self.tokenizer.table(self.model.config.vocab)
        self.table = write_table(str(directory / "run"), raw)
        self.matchers = Matchers(Vocabulary(self.table, self.model.config.vocab, ENDS), 1)
        self._raw = raw

    def job(self, name: str, schema: dict[str, Any], heat: float, seed: int) -> Job:
        text = f"<|user|>{json.dumps(schema, ensure_ascii=False)[:60]}<|end|><|assistant|>"
        prompt = tuple(self.tokenizer.encode(text))
        grammar = Grammar(write.grammar_of(write.json_schema(schema)), self.table, ENDS)
        request = Request(name, self.name, len(prompt), LONGEST, 0.0)
        sampling = Sampling(seed, heat, stop_token_ids=ENDS, grammar=grammar)
        return Job(request, prompt, sampling)

    def text(self, tokens: list[int]) -> bytes:
        return b"".join(self._raw[token] for token in tokens)


@pytest.fixture(scope="module", params=["chatter-qwen2", "reverser-moe"])
def small(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Small:
    return Small(tmp_path_factory.mktemp("specialist"), request.param)


def check(small: Small, count: int, seed: int) -> None:
    draw = random.Random(seed)
    complete = 0
    for begin in range(0, count, AT_ONCE):
        world = PolicyLoop({small.name: small.model}, 1024, 512)
        schemas = {f"r{i}": random_schema(draw) for i in range(begin, min(count, begin + AT_ONCE))}
        jobs = {
            name: small.job(name, schema, draw.choice([0.0, 0.7, 1.0]), draw.getrandbits(40))
            for name, schema in schemas.items()
        }  # fmt: skip
        for one in jobs.values():
            world.submit(one)
        while not all(world.ended(name) for name in jobs):
            world.tick()
        for name, schema in schemas.items():
            tokens, finish = world.tokens(name), world.ended(name)
            if finish is FinishReason.STOP:
                answer = json.loads(small.text(tokens).decode())
                assert conforms(schema, answer), (schema, answer)
                complete += 1
            else:
                assert finish is FinishReason.LENGTH, (schema, finish)
                assert_prefix(small, jobs[name], tokens)
    assert complete >= 0.9 * count, f"{complete} of {count}"


def assert_prefix(small: Small, one: Job, tokens: list[int]) -> None:
    """What was cut could go on."""
    assert one.sampling.grammar is not None
    try:
        small.matchers.matcher(one.sampling.grammar.text, tokens)
    except GrammarFailed as failed:
        raise AssertionError(small.text(tokens)) from failed


def test_answers_to_random_schemas(small: Small) -> None:
    check(small, 120, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_answers_to_thousands_of_random_schemas(small: Small) -> None:
    check(small, 2500, seed=2)
