"""The table of jobs: what a client has is what a displaced request continues from."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from c2cserve.core.events import (
    PROGRESS_TOKENS,
    Finished,
    FirstToken,
    Progressed,
    Recalled,
    Returned,
)
from c2cserve.core.request import Delta, FinishReason, Job, Request, Sampling, Timing
from c2cserve.runtime.gateway import Refused
from c2cserve.serving.controller.jobs import JobTable, LiveJob

TIMING = Timing("cpu0", False, 0.0, 0.0, 0.0, 0.0)


def seen(delta: Delta, after_s: float) -> Delta:
    """A first delta with what the controller adds, for a request that was never dispatched."""
    return replace(delta, timing=replace(TIMING, wait_s=-10.0, report_s=after_s))


def job(request_id: str = "r", prompt: tuple[int, ...] = (1, 2, 3), new: int = 8) -> Job:
    request = Request(request_id, "m", len(prompt), new, arrival_s=10.0)
    return Job(request, prompt, Sampling(seed=7))


def table_with(one: Job, slice_id: str | None = "cpu0") -> tuple[JobTable, list[Delta | Refused]]:
    got: list[Delta | Refused] = []
    table = JobTable()
    table.add(LiveJob(one, got.append, slice_id))
    return table, got


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3), max_size=3), st.data())
def test_displaced_job_continues_after_the_last_token_sent(
    steps: list[list[int]], data: st.DataObject
) -> None:
    new = 20
    table, got = table_with(job(new=new))
    sent: list[int] = []
    for tokens in steps:
        table.receive(Delta("r", tuple(tokens)), 11.0)
        sent += tokens
        if data.draw(st.booleans()):
            (request,), _ = table.displace("cpu0")
            live = table.get("r")
            assert live is not None
            assert live.slice_id is None
            assert request == live.request
            assert live.job.tokens == (1, 2, 3, *sent)
            assert request.prompt_len == len(live.job.tokens)
            assert request.sent == len(sent)
            assert request.max_new_tokens == new - len(sent)
            assert request.arrival_s == 10.0
            live.slice_id = "cpu0"
    assert [t for d in got if isinstance(d, Delta) for t in d.tokens] == sent


def test_only_the_slices_own_requests_are_displaced() -> None:
    table, _ = table_with(job("a"), "cpu0")
    table.add(LiveJob(job("b"), lambda _: None, "cpu1"))
    table.add(LiveJob(job("c"), lambda _: None, None))
    assert [request.id for request in table.displace("cpu0")[0]] == ["a"]
    assert table.counts() == {"m": (1, 2)}


def test_first_token_and_end_are_told_once_even_when_resumed() -> None:
    table, got = table_with(job())
    first = Delta("r", (5,), timing=TIMING, cached_tokens=2)
    assert table.receive(first, 10.5) == [FirstToken("r", 0.5)]
    table.displace("cpu0")
    again = Delta("r", (6,), timing=TIMING, cached_tokens=3)
    assert table.receive(again, 11.0) == []
    last = Delta("r", (7,), finish=FinishReason.STOP)
    assert table.receive(last, 12.0) == [Finished("r", 3)]
    assert table.receive(last, 12.0) == [], "a request ends once"
    assert got == [seen(first, 0.5), Delta("r", (6,)), last]
    assert len(table) == 0


def test_a_request_resumed_before_its_first_token_still_reports_its_timing() -> None:
    table, got = table_with(job())
    table.displace("cpu0")
    first = Delta("r", (5,), timing=TIMING)
    assert table.receive(first, 10.5) == [FirstToken("r", 0.5)]
    assert got == [seen(first, 0.5)]


def test_output_of_a_cancelled_request_goes_nowhere() -> None:
    table, got = table_with(job())
    table.drop("r")
    assert table.receive(Delta("r", (5,)), 11.0) == []
    assert got == []


def test_a_request_is_suspected_until_it_makes_progress() -> None:
    table, _ = table_with(job(new=50))
    live = table.get("r")
    assert live is not None
    for deaths in range(1, 5):
        assert table.suspected("cpu0") is (deaths > 2)
        displaced, failed = table.displace("cpu0")
        assert len(displaced) == 1
        assert not failed, "the policy says who is to blame"
        live.slice_id = "cpu0"
    tokens = tuple(range(PROGRESS_TOKENS - 1))
    assert table.receive(Delta("r", tokens), 11.0) == [FirstToken("r", 1.0)]
    assert table.suspected("cpu0")
    assert table.receive(Delta("r", (1, 2)), 12.0) == [Progressed("r", 2.0)]
    assert not table.suspected("cpu0")
    assert table.receive(Delta("r", tokens), 13.0) == [], "once in a place"
    table.displace("cpu0")
    live.slice_id = "cpu0"
    assert table.receive(Delta("r", (*tokens, 1)), 14.0) == [Progressed("r", 4.0)]


def test_a_request_that_was_never_moved_needs_no_progress() -> None:
    table, _ = table_with(job(new=50))
    assert table.receive(Delta("r", tuple(range(20))), 11.0) == [FirstToken("r", 1.0)]


def test_a_returned_job_goes_on_and_reports_its_prompt_once() -> None:
    table, got = table_with(job())
    table.receive(Delta("r", (5,), timing=TIMING, cached_tokens=2), 11.0)
    assert table.give_back("r", "elsewhere") is None
    event = table.give_back("r", "cpu0")
    live = table.get("r")
    assert live is not None
    assert event == Returned(live.request)
    assert (live.slice_id, live.job.tokens, live.request.sent) == (None, (1, 2, 3, 5), 1)
    assert table.give_back("r", "cpu0") is None, "it is on no slice"
    live.slice_id = "cpu1"
    table.receive(Delta("r", (6,), timing=TIMING, cached_tokens=3), 12.0)
    assert got[-1] == Delta("r", (6,))
    assert table.resumed == live.deaths == 0
    live.recalled = True
    assert table.give_back("r", "cpu1") == Recalled(live.request)
    assert not live.recalled
    table.drop("r")
    assert table.give_back("r", "cpu1") is None
