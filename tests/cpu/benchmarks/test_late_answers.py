"""Which late first tokens are the server's, and which the generator's that sent too late."""

import pytest
from late_answers import late_first_tokens

from c2cserve.bench.loadgen_reply import Record
from c2cserve.bench.report import SloTargets


def answered(number: int, sent_s: float, first_s: float) -> Record:
    return Record(
        number, "m", 0.0, sent_s, first_s, first_s, first_s, output_tokens=1, finish="length",
        request_id=f"r{number}",
    )  # fmt: skip


def test_what_the_generator_sent_too_late_is_not_the_server_s() -> None:
    records = [answered(0, 0.0, 0.4), answered(1, 0.0, 0.7), answered(2, 0.3, 0.6)]
    parts_ms = {"r0": {"queue": 350.0}, "r1": {"queue": 650.0}, "r2": {"queue": 250.0}}
    found = late_first_tokens(records, SloTargets(0.5, 0.1), parts_ms)
    assert found["ttft"] == 2
    assert found["ttft_server"] == 1
    assert found["lag_ms"] == pytest.approx(150.0)
    assert found["rest_ms"] == pytest.approx(50.0)


def test_without_late_answers_there_are_no_parts() -> None:
    found = late_first_tokens([answered(0, 0.0, 0.4)], SloTargets(0.5, 0.1), {})
    assert found == {"ttft": 0, "tpot": 0, "ttft_server": 0}
