"""Where targets excuse loads, a request's time for its first token stands still during one."""

from dataclasses import replace

import pytest
from cluster_cases import request, slice_, spec
from controller_hand import Hand

from c2cserve.core.events import InstanceLoading, InstanceReady
from c2cserve.core.request import Request, Slo
from c2cserve.policy.cluster.slice_load import Instance, SliceLoad
from c2cserve.policy.cluster.starts import Starts
from c2cserve.policy.slice.batching import BY_HEADROOM, ActiveModel
from c2cserve.policy.slice.estimate import StepTime

EXCUSED = Slo(1.0, 0.1, excuses_loads=True)


def excused(name: str, **more: float) -> Request:
    return replace(request(name, **more), slo=EXCUSED)


def hopeless(load: SliceLoad, now: float) -> list[str]:
    return [job.request.id for job in Starts().hopeless(load, now)]


@pytest.fixture
def load() -> SliceLoad:
    """A slice with a request whose targets excuse loads, and one whose targets do not."""
    load = SliceLoad(slice_())
    load.active["a"] = Instance(spec("a"))
    load.add(excused("excused"), now=0.1)
    load.add(request("strict"), now=0.1)
    return load


def test_a_request_is_not_hopeless_for_the_time_of_a_load(load: SliceLoad) -> None:
    model = load.active["a"]
    assert hopeless(load, 0.9) == []
    model.loading_s = 0.4
    assert hopeless(load, 5.0) == ["strict"], "a load may take long"
    load.loaded(model, 2.0)
    load.remove("a", "strict")
    assert hopeless(load, 2.9) == []
    assert hopeless(load, 3.1) == ["excused"], "one second beside the load"


def test_waiting_for_a_load_to_begin_is_not_excused(load: SliceLoad) -> None:
    load.remove("a", "strict")
    assert hopeless(load, 1.1) == ["excused"]
    load.active["a"].loading_s = 1.2
    assert hopeless(load, 3.0) == ["excused"], "nor can it be in time afterwards"


def test_all_loads_count_and_only_while_a_request_waits_there(load: SliceLoad) -> None:
    model = load.active["a"]
    model.loading_s = 0.2
    load.add(excused("later"), now=0.5)
    load.loaded(model, 0.4)
    assert model.jobs["excused"].excused_s == pytest.approx(0.4)
    assert model.jobs["later"].excused_s == pytest.approx(0.1)
    load.first_token("a", "excused", 0.7)
    model.loading_s = 2.0
    load.loaded(model, 1.0)
    assert model.jobs["excused"].excused_s == pytest.approx(0.4), "it has its first token"
    assert model.jobs["later"].excused_s == pytest.approx(1.1)


def test_a_resumed_request_has_its_first_token(load: SliceLoad) -> None:
    model = load.active["a"]
    load.add(replace(excused("resumed"), sent=3), now=0.1)
    model.loading_s = 0.2
    load.loaded(model, 1.0)
    assert model.jobs["resumed"].excused_s == 0.0


def test_the_controller_times_loads_by_what_slices_report() -> None:
    hand = Hand(slice_())
    hand.arrive("first")
    instance = hand.policy._slices["s0"].active["a"]
    instance.jobs["first"].request = excused("first")
    hand.now = 0.25
    hand.tell(InstanceLoading("a", "s0"))
    hand.now = 0.75
    hand.tell(InstanceReady("a", "s0", 0.5))
    assert instance.jobs["first"].excused_s == pytest.approx(0.5)
    hand.tell(InstanceLoading("a", "s0"), InstanceReady("a", "s0", 0.0))
    assert instance.loading_s is None, "it has ended already"


def test_on_a_slice_an_excused_request_is_as_urgent_as_if_it_came_later() -> None:
    model = ActiveModel("a", "a", 1, StepTime(), BY_HEADROOM)
    seq, strict = model.add(excused("r"), False), model.add(request("strict"), False)
    model.loading_s, seq.sent_s = 1.0, 1.5
    model.loaded(2.0)
    assert seq.due_s == pytest.approx(1.0 + 1.5)
    assert strict.due_s == pytest.approx(1.0)
    assert model.line_up(2.0)[1] == [seq, strict], "the late one yields"
    seq.length += 1
    model.loaded(2.0)
    assert seq.due_s == pytest.approx(2.5)
