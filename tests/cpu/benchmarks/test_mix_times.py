"""Step times of a server as a client measures them, on a server of which they are known."""

import json
from collections.abc import Sequence
from dataclasses import replace

import mix_times
import pytest
from mix_load import TINY
from mix_times import Times, host_times, measure_times, read_times

from c2cserve.bench.loadgen_reply import Record
from c2cserve.bench.plan import Shape
from c2cserve.sim.world.host_thread import HostTimes


def answered(shape: Shape, ttft_s: float, tpot_s: float) -> Record:
    gaps = [tpot_s] * (shape.output_tokens - 1)
    return recorded(shape, shape.due_s + ttft_s, gaps)


def recorded(shape: Shape, first_s: float, gaps: list[float]) -> Record:
    record = Record(
        0, shape.model, shape.due_s, output_tokens=shape.output_tokens, gaps_s=gaps
    )  # fmt: skip
    record.first_s = first_s
    return record


class FakeServer:
    """A slice whose steps take 1 ms and 0.1 ms a sequence or prompt token, one step at a time.
    Requests take 5 ms outside of it. With a batch of `refuses` one request is refused."""

    def __init__(self, refuses: int = 0) -> None:
        self._refuses = refuses

    def send(self, asked: Sequence[Shape], together: int | None) -> list[Record]:
        if together is None:
            return self._beside(asked[0], asked[1:])
        prefill_s = [1e-3 + 1e-4 * one.input_tokens for one in asked]
        step_s = 1e-3 + 1e-4 * together
        records = [
            answered(one, 5e-3 + took_s, step_s)
            for one, took_s in zip(asked, prefill_s, strict=True)
        ]
        if together == self._refuses:
            records[0].error = "http 429"
        return records

    def _beside(self, stream: Shape, prompts: Sequence[Shape]) -> list[Record]:
        """A prompt reaches the slice 2 ms after it is due, and is the next step there. Its first
        token takes 3 ms to its client, those of the stream none."""
        now = first_s = 5e-3 + 1e-3 + 1e-4 * stream.input_tokens
        gaps: list[float] = []
        found: list[Record] = []
        waiting = list(prompts)
        for _ in range(stream.output_tokens - 1):
            began_s = now
            while waiting and waiting[0].due_s + 2e-3 <= now:
                prompt = waiting.pop(0)
                now += 1e-3 + 1e-4 * prompt.input_tokens
                found.append(recorded(prompt, now + 3e-3, []))
            now += 1.1e-3
            gaps.append(now - began_s)
        for prompt in waiting:  # the stream has ended
            took_s = 6e-3 + 1e-4 * prompt.input_tokens
            found.append(recorded(prompt, prompt.due_s + took_s, []))
        return [*found, recorded(stream, first_s, gaps)]


def test_a_prompts_time_is_what_it_keeps_from_others() -> None:
    models = {"tiny-llama": "m", "tiny-tied": "n"}
    times = measure_times(TINY, models, FakeServer().send, "a test")
    assert times.request_s == pytest.approx(5e-3)
    for shape in models:
        assert dict(times.prefill[shape]) == pytest.approx(
            {4: 1.4e-3, 16: 2.6e-3, 48: 5.8e-3, 96: 10.6e-3}
        )
    assert dict(times.decode["tiny-llama"]["24"]) == pytest.approx(
        {1: 1.1e-3, 2: 1.2e-3, 4: 1.4e-3}
    )
    table = times.tables().get("tiny-llama", mix_times.DEVICE)
    assert table is not None
    assert table.decode_s(2, 24) == pytest.approx(1.2e-3)
    assert read_times(json.loads(json.dumps({"times": times.as_json()}))) is not None


def test_decodes_of_a_size_count_once_their_graphs_are_captured() -> None:
    """A server captures a graph when it meets a size for the second time, which delays tokens."""
    met: set[tuple[str, int, int]] = set()
    server = FakeServer()

    def send(asked: Sequence[Shape], together: int | None) -> list[Record]:
        records = server.send(asked, together)
        if together is None or together == 1:
            return records
        size = asked[0].model, asked[0].input_tokens, together
        if size not in met:
            met.add(size)
            return [answered(one, 5e-3, 7e-3) for one in asked]
        return records

    times = measure_times(TINY, {"tiny-llama": "m"}, send, "a test")
    assert dict(times.decode["tiny-llama"]["24"]) == pytest.approx(
        {1: 1.1e-3, 2: 1.2e-3, 4: 1.4e-3}
    )


def test_a_batch_that_was_refused_in_part_has_no_time() -> None:
    times = measure_times(TINY, {"tiny-llama": "m"}, FakeServer(refuses=4).send, "a test")
    assert [batch for batch, _ in times.decode["tiny-llama"]["24"]] == [1, 2]


def test_what_the_stream_does_not_cover_is_no_window() -> None:
    stream = recorded(Shape("m", 4, 7), 1.0, [0.1, 0.1, 0.5, 0.1, 0.1, 0.1])
    assert mix_times.excess_s(stream, [(1.25, 1.65)]) == pytest.approx([0.4])
    assert mix_times.excess_s(stream, [(0.9, 1.65), (1.25, 1.95)]) == []
    assert mix_times.excess_s(stream, [(1.05, 1.85)]) == [], "no gap is without a prompt"


def test_a_stream_that_ends_too_soon_is_sent_again_with_more_tokens() -> None:
    """It was slow when it was alone."""
    streams: list[int] = []

    def send(asked: Sequence[Shape], together: int | None) -> list[Record]:
        if together == 1 and asked[0].output_tokens > mix_times._DECODED:
            return [answered(one, 6e-3, 3 * 1.1e-3) for one in asked]
        if together is None:
            streams.append(asked[0].output_tokens)
        return FakeServer().send(asked, together)

    times = measure_times(TINY, {"tiny-llama": "m"}, send, "a test")
    assert dict(times.prefill["tiny-llama"])[96] == pytest.approx(10.6e-3)
    assert streams[1] > streams[0]


def test_prompts_without_a_whole_stream_have_no_times() -> None:
    def send(asked: Sequence[Shape], together: int | None) -> list[Record]:
        records = FakeServer().send(asked, together)
        if together is None:
            records[-1].error = "http 429"
        return records

    with pytest.raises(ValueError, match="too few prompts of 4 tokens were beside a whole stream"):
        measure_times(TINY, {"tiny-llama": "m"}, send, "a test")


def test_tokens_in_few_pieces_are_spread_evenly() -> None:
    record = Record(0, "m", 0.0, output_tokens=31, gaps_s=[9.0] * 5 + [0.03] * 5)
    assert mix_times.late_tpot_s(record) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="in one piece"):
        mix_times.late_tpot_s(Record(0, "m", 0.0, output_tokens=8))


COUNTERS = {
    "steps_total": 100.0, "prefill_steps_total": 10.0, "switched_steps_total": 20.0,
    "prefill_batch_seconds_total": 0.01, "prefill_launch_seconds_total": 0.1,
    "decode_batch_seconds_total": 0.035, "decode_launch_seconds_total": 0.07,
    "switched_batch_seconds_total": 0.01, "switched_launch_seconds_total": 0.03,
    "policy_seconds_total": 0.02, "submit_seconds_total": 0.3, "action_seconds_total": 0.005,
    "poll_seconds_total": 0.05, "step_wait_seconds_total": 0.02, "sleep_seconds_total": 9.0,
}  # fmt: skip


def test_what_the_host_does_for_a_step_is_what_the_server_counts() -> None:
    found = host_times(COUNTERS)
    assert found is not None
    assert found.prefill_batch_s == pytest.approx(0.001)
    assert found.prefill_launch == [(1, pytest.approx(0.01))]
    assert found.decode_s == pytest.approx(0.0015)
    assert found.switched_s == pytest.approx(0.002)
    # All of the thread's 0.375 s but sleep, less the waits and what is above.
    assert found.others_s == pytest.approx((0.375 - 0.02 - 0.255) / 100)


def test_a_server_that_does_not_count_says_nothing_of_its_host() -> None:
    assert host_times({"steps_total": 5.0}) is None
    assert host_times(COUNTERS | {"prefill_steps_total": 0.0}) is None
    none_switched = host_times(COUNTERS | {"switched_steps_total": 0.0})
    assert none_switched is not None
    assert none_switched.switched_s == none_switched.decode_s


def test_times_of_the_host_are_kept_in_the_results() -> None:
    found = Times("here", 0.0, {}, {}, host_times(COUNTERS))
    assert read_times({"times": json.loads(json.dumps(found.as_json()))}) == found


def test_the_host_is_counted_beside_streams_alone() -> None:
    """What comes before has captures of graphs and first launches."""
    sent: list[int | None] = []
    asked_after: list[list[int | None]] = []

    def send(asked: Sequence[Shape], together: int | None) -> list[Record]:
        sent.append(together)
        return FakeServer().send(asked, together)

    def counters() -> dict[str, float]:
        asked_after.append(list(sent))
        return {name: len(asked_after) * value for name, value in COUNTERS.items()}

    times = measure_times(TINY, {"tiny-llama": "m"}, send, "a test", counters)
    assert times.host is not None
    assert times.host.decode_s == pytest.approx(0.0015)
    *_, before, after = asked_after
    assert None not in before, "no stream yet"
    assert set(after[len(before) :]) == {None}
    assert after == sent


def test_a_prompts_launch_is_counted_by_its_length() -> None:
    """Alone, and without the first one of its length. One that is late does not count."""
    spent = {"prefill_steps_total": 0.0, "prefill_launch_seconds_total": 0.0}
    asked: list[tuple[str, int]] = []
    counted = 0

    def send(shapes: Sequence[Shape], together: int | None) -> list[Record]:
        for one in shapes:
            first = (one.model, one.input_tokens) not in asked
            asked.append((one.model, one.input_tokens))
            spent["prefill_steps_total"] += 1
            launch_s = (0.02 if one.model == "m" else 0.04) / one.input_tokens
            late = asked.count((one.model, one.input_tokens)) == 3
            spent["prefill_launch_seconds_total"] += 0.5 if first or late else launch_s
        return FakeServer().send(shapes, together)

    def counters() -> dict[str, float]:
        nonlocal counted
        counted += 1
        return {name: counted * value for name, value in COUNTERS.items()} | spent

    slower = {"tiny-llama": "m", "tiny-tied": "n"}
    times = measure_times(TINY, slower, send, "a test", counters)
    assert times.host is not None
    assert dict(times.host.prefill_launch) == pytest.approx(
        {4: 0.03 / 4, 16: 0.03 / 16, 48: 0.03 / 48, 96: 0.03 / 96}
    )


def test_an_earlier_result_has_one_launch_for_all_lengths() -> None:
    found = Times("here", 0.0, {}, {}, host_times(COUNTERS)).as_json()
    found["host"]["prefill_launch_s"] = found["host"].pop("prefill_launch")[0][1]
    again = read_times({"times": json.loads(json.dumps(found))})
    assert again is not None
    assert again.host is not None
    assert list(again.host.prefill_launch) == [(1, pytest.approx(0.01))]


def test_what_a_stream_hides_of_the_thread_is_not_outside_of_a_step() -> None:
    """Beside one, a prompt seems to take 6 ms. Alone, the thread takes all of its 10 ms."""
    host = HostTimes(0.001, [(1, 0.008)], decode_s=0.001, switched_s=0.001, others_s=0.001)
    decode = {"m": {"32": [(1, 0.002)]}}
    times = Times("here", 0.0, {"m": [(16, 0.006), (64, 0.006)]}, decode, host)
    alone = {"m": [(16, 0.013), (64, 0.013)]}
    assert mix_times._outside_s(times, alone) == pytest.approx(0.003)
    assert mix_times._outside_s(replace(times, host=None), alone) == pytest.approx(0.007)


HOST = HostTimes(0.001, [(1, 0.013)], decode_s=0.0015, switched_s=0.0015, others_s=0.0005)


def test_a_prompts_time_on_the_gpu_has_no_launch_in_it() -> None:
    """Prompts of up to 512 tokens are bound by their launch: the GPU's time is on a line to the
    first one that is not."""
    prompts = [(16, 0.009), (64, 0.017), (512, 0.0141), (1024, 0.021), (2048, 0.040)]
    times = Times("here", 0.0, {"m": prompts}, {"m": {"32": [(1, 0.002), (2, 0.003)]}}, HOST)
    table = times.tables().get("m", mix_times.DEVICE)
    assert table is not None
    assert table.prefill_s(0, 1) == pytest.approx(0.002), "as a decode step"
    assert table.prefill_s(0, 512) == pytest.approx(0.002 + 0.019 * 511 / 1023)
    assert table.prefill_s(0, 2048) == pytest.approx(0.040)
    assert table.base_s == pytest.approx(0.002), "what a prompt and decodes in one step share"
    unknown = replace(times, host=None).tables().get("m", mix_times.DEVICE)
    assert unknown is not None
    assert unknown.prefill_s(0, 512) == pytest.approx(0.0141)


def test_prompts_that_all_wait_for_their_launch_have_a_line_to_the_longest() -> None:
    prompts = [(16, 0.014), (512, 0.0141)]
    times = Times("here", 0.0, {"m": prompts}, {"m": {"32": [(1, 0.002)]}}, HOST)
    table = times.tables().get("m", mix_times.DEVICE)
    assert table is not None
    assert table.prefill_s(0, 512) == pytest.approx(0.0141)


def test_the_thread_takes_no_longer_than_the_fastest_decode_steps() -> None:
    decode = {"m": {"32": [(1, 0.004)]}, "n": {"32": [(1, 0.001)]}}
    times = Times("here", 0.0, {}, decode, HOST).bounded()
    assert times.host == HOST.within(0.001)
    assert replace(times, host=None).bounded().host is None
