import dataclasses
import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.core.actions import Reject
from c2cserve.core.events import Submitted
from c2cserve.core.machine import Slice
from c2cserve.core.request import Delta, Job, Request, Slo
from c2cserve.runtime.wire import TYPES, WireError, plain, tagged, untagged
from c2cserve.serving.ipc import messages as msg

FINITE = st.floats(allow_nan=False, allow_infinity=False)
WORD = st.integers(0, 2**64 - 1)

st.register_type_strategy(float, FINITE)
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(
    Request,
    st.builds(
        Request, prompt_len=st.integers(1, 10**6), max_new_tokens=st.integers(1, 10**6),
        prefix_hashes=st.lists(WORD, max_size=5).map(tuple), arrival_s=FINITE,
        slo=st.builds(Slo, FINITE, FINITE),
    ),
)  # fmt: skip
st.register_type_strategy(
    Slice,
    st.builds(Slice, kind=st.just("cpu"), kv_bytes=st.integers(4, 9), slab_bytes=st.integers(1, 4)),
)
ITEM = st.sampled_from(sorted(TYPES)).flatmap(lambda name: st.from_type(TYPES[name]))


@given(st.lists(ITEM, max_size=4))
def test_every_event_and_action_survives_json(items: list[object]) -> None:
    line = msgspec.json.encode(tagged(items))
    back = untagged(msgspec.json.decode(line))
    assert back == items
    assert [type(item) for item in back] == [type(item) for item in items]
    assert plain(back) == json.loads(line)


@given(FINITE)
def test_floats_are_exact(value: float) -> None:
    [back] = untagged(
        msgspec.json.decode(msgspec.json.encode(tagged([Reject("r", 429, "", value)])))
    )
    assert back.retry_after_s == value
    assert math.copysign(1, back.retry_after_s) == math.copysign(1, value)


@given(st.from_type(Job), st.from_type(Delta))
def test_jobs_and_deltas_survive_the_way_between_processes(job: Job, delta: Delta) -> None:
    assert msg.decode_to_worker(msg.encode(msg.Submit(job))) == msg.Submit(job)
    assert msg.decode_to_controller(msg.encode(msg.Output((delta,)))) == msg.Output((delta,))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ("Submitted", "a list"),
        ([["Nonsense", {}]], "type name, fields"),
        ([["Submitted"]], "type name, fields"),
        ([["Submitted", {}]], "request"),
        ([["Cancelled", {"request_id": 3}]], "request_id"),
        ([["StepParked", {"step_id": 1.5}]], "step_id"),
        ([["Reject", {"request_id": "r", "status": "429", "reason": ""}]], "status"),
    ],
)
def test_what_is_no_event_is_refused_by_name(data: object, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        untagged(data)


def test_a_request_that_breaks_its_own_rules_is_refused() -> None:
    good = plain([Submitted(Request("r", "m", 3, 4, 0.0))])
    assert untagged(good) == [Submitted(Request("r", "m", 3, 4, 0.0))]
    good[0][1]["request"]["prompt_len"] = 0
    with pytest.raises(WireError, match="prompt_len"):
        untagged(good)


def test_names_are_unique() -> None:
    assert all(dataclasses.is_dataclass(kind) for kind in TYPES.values())
    assert len(set(TYPES.values())) == len(TYPES) == 73


@given(st.from_type(msg.Switch), st.from_type(msg.Ready))
def test_that_a_model_is_kept_crosses_to_the_worker_and_back(
    switch: msg.Switch, ready: msg.Ready
) -> None:
    assert msg.decode_to_worker(msg.encode(switch)) == switch
    assert msg.decode_to_controller(msg.encode(ready)) == ready
