"""The soak's judge: what it must not let pass, and what it must."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from soak.case import COMPLETIONS, Case, Leave, Reply, Said
from soak.catalogue import Model
from soak.findings import Findings
from soak.hostile import ALLOWED, Sent, choices_of, faults_of
from soak.judge import Judge
from soak.memory import Memory
from soak.moments import Moments
from soak.raw import Answer
from soak.watch import Watch

MODEL = Model("m", Path("m"), 512, 1024, 64, 1000, numbers=True)
BODY = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0, "logprobs": 0}
CASE = Case("c-1", "short", MODEL, COMPLETIONS, BODY, frozenset({200}), {}, (3,))
HEADERS = {"x-request-id": "c-1", "x-c2cserve-slice": "cpu0"}
USAGE = {
    "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 0},
}  # fmt: skip
LATE = {"message": "busy", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
GONE = {"message": "no", "type": "invalid_request_error", "param": "model",
        "code": "model_not_found"}  # fmt: skip


class Court:
    def __init__(self, directory: Path) -> None:
        self.findings = Findings(directory, 7, 0.0, lambda _: None)
        self.moments = Moments()
        self.judge = Judge(self.findings, self.moments)

    def faults(self, reply: Reply, case: Case = CASE) -> list[str]:
        self.judge.judge(case, reply)
        return list(self.findings.violations)


@pytest.fixture
def court(tmp_path: Path) -> Court:
    return Court(tmp_path)


def good(**changes: Any) -> Reply:
    said = Said(" 8 9", [" 8", " 9"], [-0.5, -0.25], finishes=["length"])
    reply = Reply(100.0, 200, dict(HEADERS), {0: said}, dict(USAGE), end="whole", ended_s=101.0)
    return replace(reply, **changes)


def said(**changes: Any) -> dict[int, Said]:
    return {0: replace(good().choices[0], **changes)}


def test_a_good_answer_passes(court: Court) -> None:
    assert court.faults(good()) == []
    assert court.judge.tally.ended == 1


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"end": "cut"}, "an answer's end: cut"),
        ({"end": "no end"}, "an answer's end: no end"),
        ({"status": 500, "error": LATE}, "status"),
        ({"status": 429, "error": LATE}, "status"),
        ({"status": 404, "error": GONE}, "status"),
        ({"end": "error event", "error": LATE}, "an error in a stream"),
        ({"headers": {"x-c2cserve-slice": "cpu0"}}, "x-request-id"),
        ({"headers": {"x-request-id": "c-1"}}, "x-c2cserve-slice"),
        ({"choices": {}}, "choices"),
        ({"choices": said(finishes=[])}, "finish_reason"),
        ({"choices": said(finishes=["stop"])}, "finish_reason"),
        ({"choices": said(finishes=["length", "length"])}, "finish_reason"),
        ({"choices": said(logprobs=[-0.5])}, "tokens of an answer"),
        ({"choices": said(logprobs=[-0.5, float("nan")])}, "a log-probability"),
        ({"usage": None}, "usage"),
        ({"usage": {**USAGE, "total_tokens": 6}}, "usage"),
        ({"usage": {**USAGE, "prompt_tokens": 4, "total_tokens": 6}}, "usage"),
        ({"usage": {**USAGE, "completion_tokens": 1, "total_tokens": 4}}, "usage"),
    ],
)
def test_what_must_not_pass(court: Court, changes: dict[str, Any], fault: str) -> None:
    assert court.faults(good(**changes)) == [fault]
    [line] = court.findings.file.read_text().splitlines()
    assert json.loads(line)["sent"]["body"] == BODY
    assert json.loads(line)["seed"] == 7


def test_a_stop_string_is_not_shown(court: Court) -> None:
    case = replace(CASE, body={**BODY, "stop": ["8"]})
    assert court.faults(good(), case) == ["a stop string in the output"]


def test_refusals_of_the_moment(court: Court) -> None:
    """Only while the model is out of the catalogue, only while draining, only with Retry-After."""
    gone = good(status=404, error=GONE)
    court.moments.removing("m")
    meanwhile = replace(gone, sent_s=court.moments._absent["m"][0].begin_s, ended_s=1e9)  # pyright: ignore[reportPrivateUsage]
    assert court.faults(meanwhile) == []
    court.moments.draining_s = 100.5
    refused = good(status=503, error={**LATE, "code": None})
    assert court.faults(refused) == ["Retry-After"]
    allowed = replace(refused, headers={**HEADERS, "retry-after": "5"})
    before = court.findings.violations.total()
    court.faults(allowed)
    assert court.findings.violations.total() == before


def test_four_lost_workers_may_fail_a_request(court: Court) -> None:
    failed = good(end="error event", error=LATE, ended_s=1e12)
    for lost in range(4):
        assert "an error in a stream" in court.faults(failed) or lost == 4
        court.moments.disturbed("cpu0")
    before = court.findings.violations.total()
    court.faults(failed)
    assert court.findings.violations.total() == before


def test_who_leaves_is_owed_nothing_more(court: Court) -> None:
    case = replace(CASE, leave=Leave(pieces=1), body={**BODY, "stream": True})
    assert court.faults(good(end="left", usage=None, choices={}), case) == []
    assert court.faults(good(end="left", status=None, headers={}), case) == []
    assert court.judge.tally.left == 2
    late = replace(case, allowed=frozenset({503}))
    assert court.faults(good(end="left", status=503, choices={}, error=None), late) == []
    assert court.faults(good(status=503, choices={}, error=None), late) == ["an error's shape"]


def test_full_filesystems_may_refuse(court: Court) -> None:
    """While it is full and a little longer, with what to wait for."""
    lack = "[Errno 28] No space left on device"
    refused = good(status=503, error={**LATE, "code": None, "message": lack})
    assert "status" in court.faults(refused)
    court.moments.filling()
    begin_s = court.moments._full[0].begin_s  # pyright: ignore[reportPrivateUsage]
    meanwhile = replace(
        refused, headers={**HEADERS, "retry-after": "5"}, sent_s=begin_s, ended_s=begin_s + 1
    )
    before = court.findings.violations.total()
    court.faults(meanwhile)
    assert court.findings.violations.total() == before
    court.moments.freed()
    later = replace(meanwhile, sent_s=begin_s + 60, ended_s=begin_s + 61)
    court.faults(later)
    assert court.findings.violations.total() == before + 1


def test_models_that_come_and_go_are_not_tallied(court: Court) -> None:
    """Their counters go with them."""
    court.moments.removing("m")
    court.moments.added("m")
    assert court.faults(good()) == []
    assert court.judge.tally.ended == court.judge.tally.output_tokens == 0


def look(watch: Watch, **counts: float) -> None:
    samples = {f'tokens_total{{model_name="{name}"}}': count for name, count in counts.items()}
    watch._counters(samples)  # pyright: ignore[reportPrivateUsage]


def test_counters_of_removed_models_go_and_others_never_fall(court: Court, tmp_path: Path) -> None:
    log, memory = tmp_path / "log", Memory(tmp_path / "memory.csv", 0, judge_gpu=False)
    server: Any = None
    watch = Watch(server, log, tmp_path, court.findings, court.moments, memory, ["stays"])
    look(watch, stays=5, added=7)
    assert watch.counted("tokens_total") == 5
    look(watch, stays=6)
    assert not court.findings.violations
    look(watch, stays=6, added=3)
    look(watch, stays=6, added=2)
    assert court.findings.violations == {"a counter fell": 1}
    look(watch, stays=4)
    look(watch)
    assert court.findings.violations == {"a counter fell": 3}


# ---- attacks -------------------------------------------------------------------------------------

WRONG = Sent(b"POST /v1/completions HTTP/1.1\r\n\r\n{}", field="max_tokens")


def answered(status: int, **error: Any) -> Answer:
    content = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}
    body = json.dumps({"error": content | error}).encode()
    return Answer(100.0, status, {"x-request-id": "a"}, body, whole=True, ended_s=101.0)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (answered(400, param="max_tokens"), None),
        (answered(400, param="max_tokens.1"), None),
        (answered(400, param="min_tokens"), None),
        (answered(400, param="stop"), "an error's field"),
        (answered(400), "an error's field"),
        (answered(404), None),
        (answered(500), "status"),
        (answered(503), "status"),
        (answered(429), "Retry-After"),
        (replace(answered(400, param="max_tokens"), headers={}), "x-request-id"),
        (replace(answered(400), whole=False), "an answer's end"),
        (replace(answered(400), body=b"no"), "an error's shape"),
        (Answer(100.0), "status"),
    ],
)
def test_what_an_attack_must_not_get(answer: Answer, fault: str | None) -> None:
    found = [name for name, _, _ in faults_of(WRONG, answer, set(ALLOWED))]
    assert found == ([fault] if fault else [])


def test_what_an_attack_may_have_counted() -> None:
    body = b'{"choices": [{"finish_reason": "stop"}, {"finish_reason":"length"}]}'
    whole = Answer(1.0, 200, {}, body, whole=True)
    assert choices_of(WRONG, whole) == 2
    assert choices_of(WRONG, replace(whole, whole=False)) == 256
    assert choices_of(WRONG, answered(400)) == 0
