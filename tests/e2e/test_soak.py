"""The soak itself: it finds what is planted, and a minute of it finds nothing."""

import asyncio
import json
import random
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from catalogue_server import Server
from soak.catalogue import Catalogue, Shape, make_catalogue
from soak.client import Client
from soak.comparing import Asked, Checker
from soak.findings import Findings
from soak.judge import Judge
from soak.kinds import CALM, Limits, Sampler
from soak.moments import Moments

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> object:
    work = tmp_path_factory.mktemp("soak")
    catalogue = make_catalogue(work, (Shape("tiny-qwen3", 2, 1, 512),))
    pool = work / "pool"
    pool.mkdir()
    arguments = ["--gpu-slices", "none", "--slices", "1", "--pool-dir", str(pool)]
    with Server(catalogue.file, work / "server.log", arguments) as server:
        server.wait_ready(60, lambda _: None)
        yield server, catalogue


def test_processes_of_a_server(served: tuple[Server, Catalogue]) -> None:
    server, _ = served
    [slice_] = server.state()["slices"]
    found = server.processes({slice_["pid"]: slice_["id"]})
    kinds = {one.kind for one in found}
    kinds.discard("tokenizer probe")  # it may have ended
    assert kinds == {"server", "text process", "fork server", f"worker/{slice_['id']}"}
    assert next(one.bytes for one in found if one.kind == "server") > 1 << 20


@pytest.mark.parametrize("gpu", [False, True], ids=["to the bit", "scored again"])
def test_a_planted_lie_is_found(
    served: tuple[Server, Catalogue], tmp_path: Path, gpu: bool
) -> None:  # fmt: skip
    """By comparing with the model alone, as CPU slices are, and by scoring again, as GPU slices'
    answers to what is not calm."""
    server, catalogue = served
    findings = Findings(tmp_path, 1, time.monotonic(), lambda _: None)
    judge, moments = Judge(findings, Moments()), Moments()
    checker = Checker(findings, judge, moments, random.Random(1), gpu)
    [model] = [one for one in catalogue.models if one.numbers]
    sampler = Sampler(random.Random(2), model, Limits(output=24, prompt=256), families=1)

    async def scenario() -> None:
        async with Client(server.url, 30.0) as client:
            prompt = sampler.tokens(40)
            scored = sampler.case("medium", prompt, (40,), max_tokens=12, logprobs=0)
            unscored = sampler.case("medium", prompt, (40,), max_tokens=12)
            calm = CALM.make(sampler, CALM.name)
            cases = [replace(one, id=f"t-{i}") for i, one in enumerate((scored, unscored, calm))]
            asked = [Asked(one, await client.ask(one), 1) for one in cases]
            assert all(judge.judge(one.case, one.reply) for one in asked)
            await checker.check(client, asked, float("inf"))
            assert not findings.violations
            assert findings.checks["compared to the bit"] == (1 if gpu else 3)
            assert findings.checks["scored again"] == (2 if gpu else 0)
            said = asked[0].reply.choices[0]
            said.logprobs[5] = (said.logprobs[5] or 0.0) - 1.0
            words = asked[1].reply.choices[0].text.split()
            asked[1].reply.choices[0].text = "".join(f" {word}" for word in [*words[:-1], "3"])
            await checker.check(client, asked[:2], float("inf"))

    asyncio.run(scenario())
    name = "an answer scored again" if gpu else "bits"
    assert findings.violations == {name: 2}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_minute_of_it(tmp_path: Path) -> None:
    """With kills, stops, attacks and a changing catalogue; which seed is of no importance, that it
    is the same one each time is."""
    command = [ROOT / "scripts" / "soak", "--minutes", "1.2", "--seed", "5", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["checks"]["compared to the bit"] > 200
    events = summary["events"]
    assert events["killed while up"] > 0
    assert events["attack: one wrong field"] > 20
    assert events["bad checkpoint: 400"] > 3
    if summary["filesystem filled"] is True:
        assert events["filesystem filled"] > 0
    assert len(summary["phases"]) == 4
