"""Whole models come to HBM and leave it beside steps: nothing is read early or overwritten."""

import logging
from dataclasses import replace

import pytest
from example_counts import examples
from fake_load_copies import KV, ROW, TASK_BYTES, UNDER_WAY, FakeSlice
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.core.step import Lane
from c2cserve.engine.gpu.weight_loads import LoadOutcome

ARENA = 64 * ROW
ROWS = {"a": [9, 2, 7], "b": [12, 12], "c": [1, 5, 1, 5], "d": [40]}


def size_of(model: str) -> int:
    return sum(ROWS[model]) * ROW


def test_layers_are_shown_as_they_arrive() -> None:
    slice_ = FakeSlice(ARENA, ROWS)
    changes = slice_.cache.changes
    slice_.fetch("a", 0)
    assert slice_.loads.arrived("b") is None, "it is not loaded"
    slice_.now = 2.0
    seen: list[tuple[int | None, int]] = []
    while slice_.loads._loads:
        slice_.step("a", 4 * ROW)
        seen.append((slice_.loads.arrived("a"), slice_.cache.bytes))
        assert slice_.cache.changes == changes, "tables look for moved weights once"
        slice_.copies.steps.run()
        slice_.copies.run(1)
        slice_.poll()
    first = ROWS["a"][0] * ROW
    assert seen == [(0, 0)] * 3 + [(1, first)] * 4, "layers of a part come together"
    assert slice_.loads.arrived("a") is None
    assert not slice_.loads.over_link("a")
    assert slice_.outcomes == [LoadOutcome("a", 2.0)]
    assert slice_.cache.changes == changes + 1
    assert slice_.cache.bytes == size_of("a")
    slice_.step("a", 4 * ROW)
    slice_.copies.steps.run()
    assert slice_.checked == 4 + len(ROWS["a"]), "steps read what was shown when launched"
    assert slice_.copies.held == 0, "no step waited"
    counts = slice_.loads.counts
    assert (counts.fetches, counts.copied_bytes, counts.seconds) == (1, size_of("a"), 2.0)
    assert (counts.cancelled, counts.refused) == (0, 0)


def test_a_part_that_overtakes_another_is_shown_after_it() -> None:
    slice_ = FakeSlice(ARENA, ROWS)
    slice_.fetch("b", 0)
    slice_.copies.steps.run()
    slice_.copies.run(4, last_first=True)
    assert slice_.copies.tickets, "the first part is under way"
    assert slice_.loads.arrived("b") == 0
    slice_.copies.run(4)
    assert slice_.loads.arrived("b") is None
    assert slice_.poll() == [LoadOutcome("b")]


def test_a_load_that_ends_halfway_leaves_nothing_of_its_model() -> None:
    slice_ = FakeSlice(ARENA, ROWS)
    slice_.fetch("a", 0)
    slice_.copies.steps.run()
    slice_.copies.run(4)
    assert slice_.loads.arrived("a") == 1
    slice_.step("a", 0)
    changes = slice_.cache.changes
    slice_.loads.release("a")
    assert slice_.loads.arrived("a") is None
    assert slice_.loads.over_link("a")
    assert slice_.cache.changes > changes
    assert slice_.cache.bytes == 0
    slice_.fetch("d", 0)
    slice_.finish()
    assert slice_.checked == 1, "it was not overwritten before the step had read it"
    assert slice_.whole("d")


def test_a_load_that_waits_for_the_pool_has_no_layers_yet() -> None:
    slice_ = FakeSlice(ARENA, ROWS)
    slice_.pooled.discard("a")
    slice_.fetch("a", 0)
    assert slice_.loads.arrived("a") == 0
    slice_.pooled.add("a")
    slice_.finish()
    assert slice_.loads.arrived("a") is None


def test_a_load_waits_for_steps_that_still_read_what_was_there() -> None:
    slice_ = FakeSlice(ARENA, ROWS)
    slice_.fetch("d", 0)
    slice_.finish()
    slice_.step("d", 0)
    slice_.loads.release("d")
    assert slice_.cache.bytes == 0
    slice_.fetch("b", 0)
    slice_.copies.run()
    assert not slice_.poll(), "the step has not run"
    slice_.copies.steps.run()
    slice_.finish()
    assert slice_.whole("b")
    assert slice_.checked == 1
    assert slice_.loads.counts.releases == 1


def test_kv_that_grows_into_a_load_cancels_it_and_waits_for_its_last_copies() -> None:
    slice_ = FakeSlice(ARENA, ROWS)
    slice_.fetch("d", 0)
    slice_.copies.steps.run()
    slice_.copies.run(1)
    slice_.step("a", ARENA - 30 * ROW)
    slice_.step("a", ARENA - 30 * ROW)
    assert slice_.copies.held == 1
    assert slice_.poll() == [LoadOutcome("d", refused=True)]
    slice_.copies.steps.run()
    assert slice_.arena.max() < KV, "the step waits"
    slice_.finish()
    copied = slice_.loads.counts.copied_bytes
    assert copied == (1 + UNDER_WAY) * TASK_BYTES, "no more of it is copied"
    assert (slice_.arena[: ARENA - 30 * ROW] == KV).all()
    assert (slice_.loads.counts.cancelled, slice_.loads.counts.refused) == (1, 1)
    assert slice_.cache._gaps() == [(ARENA - 30 * ROW, ARENA)]


def test_kv_does_not_wait_for_a_load_that_has_not_begun() -> None:
    slice_ = FakeSlice(ARENA, ROWS)
    slice_.step("c", 0)
    slice_.fetch("d", 0)
    slice_.step("a", ARENA)
    assert slice_.copies.held == 0
    slice_.copies.steps.run()
    slice_.finish()
    assert (slice_.arena == KV).all()
    assert slice_.loads.counts.copied_bytes == 0


def test_a_load_waits_for_the_last_copies_of_a_cancelled_one() -> None:
    """They may come over another link, after its own."""
    slice_ = FakeSlice(ARENA, ROWS)
    slice_.fetch("d", 0)
    slice_.copies.steps.run()
    slice_.copies.run(1)
    slice_.loads.release("d")
    slice_.fetch("b", 0)
    assert len(slice_.copies.tickets) == 1, "the second load is not submitted"
    slice_.finish()
    slice_.step("b", 0)
    slice_.copies.steps.run()
    assert slice_.checked == len(ROWS["b"])


def test_a_model_that_loses_one_place_to_kv_loses_all() -> None:
    slice_ = FakeSlice(ARENA, ROWS)
    for model in "ab":
        slice_.fetch(model, 0)
    slice_.finish()
    low = min("ab", key=lambda m: min(slice_.cache.location(w).pointer for w in slice_.weights[m]))
    first = min(slice_.cache.location(w).pointer for w in slice_.weights[low])
    slice_.poll()
    slice_.step("c", first - slice_.arena.data_ptr() + 1)
    assert slice_.poll() == [LoadOutcome(low, refused=True)]
    assert not slice_.whole(low)
    assert slice_.cache.bytes == size_of("ab".replace(low, ""))


def test_a_model_without_room_is_refused_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    slice_ = FakeSlice(ARENA, ROWS)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            slice_.fetch("d", ARENA - 39 * ROW)
            assert slice_.poll() == [LoadOutcome("d", refused=True)]
    assert len(caplog.records) == 1
    assert slice_.copies.copies == 0
    assert slice_.loads.counts.refused == 2
    slice_.fetch("d", ARENA - 40 * ROW)
    slice_.finish()
    assert slice_.whole("d"), "KV ends lower now"


def test_loads_follow_one_another_and_each_counts_its_own_time() -> None:
    slice_ = FakeSlice(ARENA, ROWS)
    slice_.fetch("a", 0)
    slice_.fetch("b", 0)
    slice_.now = 3.0
    while not slice_.whole("a"):
        slice_.copies.steps.run()
        slice_.copies.run(1)
        slice_.poll()
    assert not slice_.whole("b")
    slice_.now = 5.0
    slice_.finish()
    assert slice_.outcomes == [LoadOutcome("a", 3.0), LoadOutcome("b", 2.0)]


def test_a_load_that_waits_for_the_pool_holds_up_no_other() -> None:
    slice_ = FakeSlice(ARENA, ROWS)
    slice_.pooled.discard("a")
    slice_.fetch("a", 0)
    slice_.fetch("b", 0)
    assert slice_.loads.waiting
    slice_.finish()
    assert slice_.outcomes == [LoadOutcome("b")]
    slice_.step("b", 6 * ROW)
    slice_.pooled.add("a")
    slice_.finish()
    assert not slice_.loads.waiting
    assert slice_.whole("a")
    assert all(
        slice_.cache.location(w).pointer >= slice_.cache.address_of(6 * ROW)
        for w in slice_.weights["a"]
    )


def test_a_fault_of_one_model_refuses_it_and_a_fatal_one_is_raised() -> None:
    slice_ = FakeSlice(ARENA, ROWS)
    slice_.fetch("unknown", 0)
    assert slice_.poll() == [LoadOutcome("unknown", refused=True)]
    slice_.copies.fault = OSError("CUDA error")
    with pytest.raises(OSError, match="CUDA error"):
        slice_.fetch("a", 0)


def test_a_failed_step_ends_loads_and_leaves_models_that_are_there() -> None:
    slice_ = FakeSlice(ARENA, ROWS)
    slice_.fetch("a", 0)
    slice_.finish()
    slice_.fetch("b", 0)
    slice_.copies.steps.run()
    slice_.loads.synchronize()
    slice_.cache.clear()
    slice_.loads.drop()
    assert slice_.poll() == [LoadOutcome("b", refused=True)]
    assert slice_.whole("a")
    assert slice_.cache.bytes == size_of("a")
    slice_.fetch("b", 0)
    slice_.finish()
    assert slice_.whole("b")


def test_weights_are_copied_from_a_neighbour_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    slice_ = FakeSlice(ARENA, ROWS)
    there = [memory.clone() for memory in slice_.host["b"]]
    for memory in slice_.host["b"]:
        memory.zero_()  # so that only the neighbour's copy is right
    at = {w.pointer: copy for w, copy in zip(slice_.weights["b"], there, strict=True)}
    monkeypatch.setattr(
        slice_.cache, "location",
        lambda w: replace(w, pointer=at[w.pointer].data_ptr(), home="peer"),
    )  # fmt: skip
    slice_.fetch("b", 0)
    slice_.finish()
    monkeypatch.undo()
    slice_.host["b"] = there
    slice_.step("b", 0)
    slice_.copies.steps.run()
    assert slice_.checked == len(ROWS["b"])


def test_a_load_does_not_wait_for_a_stream_that_reads_none_of_its_places() -> None:
    slice_ = FakeSlice(ARENA, ROWS, lanes=2)
    slice_.step("c", 0, "streaming")
    slice_.fetch("a", 0)
    slice_.copies.steps.run()
    slice_.copies.run()
    assert slice_.copies.copies > 0
    assert slice_.poll() == [LoadOutcome("a", 0.0)]
    assert slice_.fence.waits == 0


def test_loads_and_kv_wait_for_a_stream_that_reads_what_was_dropped() -> None:
    slice_ = FakeSlice(ARENA, ROWS, lanes=2)
    slice_.fetch("d", 0)
    slice_.finish()
    slice_.poll()
    slice_.step("d", 0, "streaming")
    slice_.loads.release("d")
    slice_.fetch("b", 0)
    slice_.step("a", 30 * ROW)
    slice_.copies.steps.run()
    slice_.copies.run()
    assert len(slice_.flying) == 2, "the resident lane waits"
    assert not slice_.whole("b")
    slice_.copies.streaming.run()
    slice_.finish()
    assert not slice_.flying
    assert slice_.whole("b")
    assert slice_.fence.waits == 1


def test_a_stream_waits_for_copies_where_its_kv_grows() -> None:
    slice_ = FakeSlice(ARENA, ROWS, lanes=2)
    slice_.fetch("d", 0)
    slice_.copies.steps.run()
    slice_.copies.run(1)
    slice_.step("a", ARENA - 30 * ROW, "streaming")
    slice_.copies.streaming.run()
    assert slice_.arena.max() < KV, "the stream waits"
    slice_.finish()
    assert not slice_.flying


Turn = st.one_of(
    st.tuples(st.just("fetch"), st.sampled_from("abcd"), st.integers(0, 40)),
    st.tuples(st.just("release"), st.sampled_from("abcd"), st.just(0)),
    st.tuples(st.just("step"), st.sampled_from("abcd"), st.integers(0, 64)),
    st.tuples(st.just("steps run"), st.just(""), st.integers(1, 3)),
    st.tuples(st.just("copies run"), st.just(""), st.integers(1, 6)),
    st.tuples(st.just("later copies run"), st.just(""), st.integers(1, 3)),
    st.tuples(st.just("look"), st.sampled_from("abcd"), st.just(0)),
    st.tuples(st.just("poll"), st.just(""), st.just(0)),
    st.tuples(st.just("pool"), st.sampled_from("abcd"), st.integers(0, 1)),
    st.tuples(st.just("drop"), st.just(""), st.just(0)),
)


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(Turn, max_size=60))
def test_in_any_order_nothing_is_read_early_or_overwritten(
    turns: list[tuple[str, str, int]],
) -> None:
    check_turns(FakeSlice(ARENA, ROWS), turns)


@settings(max_examples=examples(400), deadline=None)
@given(
    st.lists(
        st.one_of(
            Turn,
            st.tuples(st.just("stream"), st.sampled_from("abcd"), st.integers(0, 64)),
            st.tuples(st.just("streams run"), st.just(""), st.integers(1, 3)),
        ),
        max_size=60,
    )
)
def test_in_any_order_two_lanes_and_loads_do_not_disturb_each_other(
    turns: list[tuple[str, str, int]],
) -> None:
    check_turns(FakeSlice(ARENA, ROWS, lanes=2), turns)


def check_turns(slice_: FakeSlice, turns: list[tuple[str, str, int]]) -> None:
    asked: set[str] = set()
    for what, model, number in turns:
        match what:
            case "fetch" if model not in asked:
                asked.add(model)
                slice_.fetch(model, kv_end_of(slice_, number))
            case "release":
                asked.discard(model)
                slice_.loads.release(model)
            case "step" | "stream":
                lane: Lane = "resident" if what == "step" else "streaming"
                if all(one.lane == lane for one in slice_.flying if one.model == model):
                    slice_.step(model, kv_end_of(slice_, number), lane)
            case "steps run":
                slice_.copies.steps.run(number)
            case "streams run":
                slice_.copies.streaming.run(number)
            case "copies run":
                slice_.copies.run(number)
            case "later copies run":
                slice_.copies.run(number, last_first=True)
            case "look":
                check_arrived(slice_, model)
            case "pool":
                (slice_.pooled.add if number else slice_.pooled.discard)(model)
            case "drop":
                slice_.loads.drop()
            case _:
                for one in slice_.poll():
                    if one.refused:
                        asked.discard(one.model)
                    else:
                        assert slice_.whole(one.model)
        check_places(slice_)
    slice_.pooled = set(ROWS)
    slice_.finish()
    assert not slice_.loads._loads
    assert not any(lane.work for lane in slice_.lanes.values()), "a step waits for ever"
    assert slice_.cache.bytes == sum(size_of(m) for m in ROWS if slice_.whole(m))
    for model in ROWS:
        slice_.step(model, slice_.cache._kv_end)
        slice_.copies.steps.run()
        slice_.loads.release(model)
    assert not slice_.flying
    assert slice_.cache.bytes == 0
    kv_end = slice_.cache._kv_end
    assert slice_.cache._gaps() == ([(kv_end, ARENA)] if kv_end < ARENA else []), "a trace is left"


def check_arrived(slice_: FakeSlice, model: str) -> None:
    """The first layers are in the arena, and only they."""
    there = slice_.loads.arrived(model)
    if there is None:
        assert slice_.whole(model) or not any(map(slice_.is_kept, slice_.weights[model]))
        return
    kept = [slice_.is_kept(w) for w in slice_.weights[model]]
    assert kept == [at < there for at in range(len(kept))]


def kv_end_of(slice_: FakeSlice, rows: int) -> int:
    """As a policy says it of two lanes: KV of steps in flight lies below it too."""
    flying = [one.kv_end for one in slice_.flying] if len(slice_.lanes) > 1 else []
    return max([rows * ROW, *flying])


def check_places(slice_: FakeSlice) -> None:
    cache = slice_.cache
    entries = {**cache._entries, **cache._reserved}
    spans = sorted((entry.start, entry.stop) for entry in entries.values())
    assert [start for start, _ in cache._starts] == [start for start, _ in spans]
    bounds = [cache._kv_end, *(edge for span in spans for edge in span), ARENA]
    assert bounds == sorted(bounds), "places overlap"
