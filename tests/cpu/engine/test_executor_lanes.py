"""Two lanes of an executor: on fake devices, whose work is over when the test says so."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lane import Lane, LateModel
from late import LateOps
from tiny import make_checkpoint

from c2cserve.core.events import StepDone, StepFailed
from c2cserve.core.step import Lane as LaneName
from c2cserve.engine.gpu import lanes as gpu_lanes
from c2cserve.engine.gpu import load_transfers
from c2cserve.engine.gpu.lanes import LaneFence, Mark
from c2cserve.engine.lanes import LaneParts
from c2cserve.engine.moved import MovedBytes
from c2cserve.transfer.settings import Urgency

PROMPT = torch.randint(3, 160, (7,), generator=torch.Generator().manual_seed(3)).tolist()


class TwoLanes(Lane):
    """Models `near` and `far`, which are the same, and operators for each lane."""

    def __init__(self, folder: Path) -> None:
        self.near, self.far = LateOps(), LateOps()
        self.renewals = 0
        self.inside = 0
        """Launches under way within the streaming lane."""
        self.attached = 0
        self.streamed = 0

        @contextmanager
        def current() -> Iterator[None]:
            self.inside += 1
            try:
                yield
            finally:
                self.inside -= 1

        def attached() -> None:
            self.attached += 1

        streaming = LaneParts(self.far, None, current, attached)
        super().__init__(
            self.near, streaming=streaming, moved=lambda: MovedBytes(self.streamed),
            renew=self._renew,
        )  # fmt: skip
        for name in ("near", "far"):
            self.attach(name, LateModel(folder).load_all().decoder)
            self.add(name, name, PROMPT, 40)

    def _renew(self) -> None:
        """Wait for both lanes, as a GPU's parts do before they are built anew."""
        self.renewals += 1
        for ops in (self.near, self.far):
            ops.finish(len(ops.samples))

    def done_ids(self) -> list[int]:
        return [done.step_id for done in self.take_done()]


@pytest.fixture
def lanes(tmp_path: Path) -> TwoLanes:
    make_checkpoint(tmp_path, "llama")
    return TwoLanes(tmp_path)


def test_steps_end_in_order_within_a_lane_and_in_any_order_across(lanes: TwoLanes) -> None:
    stream = lanes.launch(("far", 0, 7), lane="streaming")
    ahead = lanes.launch(("far", 7, 1), lane="streaming")
    first = lanes.launch(("near", 0, 7))
    assert lanes.done_ids() == []
    lanes.near.finish()
    assert lanes.done_ids() == [first]
    second, third = lanes.launch(("near", 7, 1)), lanes.launch(("near", 8, 1))
    lanes.near.finish(2)
    assert lanes.done_ids() == [second, third]
    lanes.far.finish(2)
    assert lanes.done_ids() == [stream, ahead]
    assert lanes.near.awaited == lanes.far.awaited == 0
    assert lanes.tokens("near")[:2] == lanes.tokens("far")
    assert not lanes.executor.lanes_in_flight("near")


def test_each_lane_has_its_own_operators_and_its_own_time(lanes: TwoLanes) -> None:
    lanes.launch(("far", 0, 7), lane="streaming")
    lanes.launch(("near", 0, 7))
    assert (len(lanes.far.samples), len(lanes.near.samples)) == (1, 1)
    assert lanes.executor.lanes_in_flight("near") == {"resident"}
    assert lanes.executor.lanes_in_flight("far") == {"streaming"}
    lanes.near.finish()
    [near] = lanes.take_done()
    for position in range(7, 12):
        lanes.launch(("near", position, 1))
        lanes.near.finish()
        lanes.take_done()
    lanes.far.finish()
    [far] = lanes.take_done()
    assert far.compute_s > 3 * near.compute_s, "it ran all along, beside the others"
    assert lanes.inside == 0
    assert lanes.attached == 2


def test_what_must_be_waited_for_is_waited_for_in_its_lane_alone(lanes: TwoLanes) -> None:
    """Tokens that are not all in one sample: the resident lane's, as a stream goes on."""
    lanes.launch(("far", 0, 7), lane="streaming")
    for name in ("a", "b"):
        lanes.add(name, "near", PROMPT, 9)
        lanes.launch((name, 0, 7))
    lanes.launch(("a", 7, 1), ("b", 7, 1))
    assert len(lanes.far.samples) == 1
    assert lanes.take_done() != []
    assert not lanes.far.samples[0].done


def test_steps_tell_what_their_launch_streamed(lanes: TwoLanes) -> None:
    prepare = lanes.far.sample

    def sample(logits: Any, rows: Any) -> Any:
        lanes.streamed += 100
        return prepare(logits, rows)

    lanes.far.sample = sample  # pyright: ignore[reportAttributeAccessIssue]
    lanes.launch(("near", 0, 7))
    lanes.launch(("far", 0, 7), lane="streaming")
    lanes.launch(("near", 7, 1))
    lanes.near.finish(2)
    lanes.far.finish()
    assert [done.streamed_bytes for done in lanes.take_done()] == [0, 0, 100]


def test_a_failed_step_ends_after_those_of_both_lanes(lanes: TwoLanes) -> None:
    lanes.launch(("far", 0, 7), lane="streaming")
    lanes.executor.detach("near")
    failed = lanes.launch(("near", 0, 7))
    far, near = lanes.events
    assert isinstance(far, StepDone)
    assert isinstance(near, StepFailed)
    assert near.step_id == failed
    assert len(lanes.tokens("far")) == 1, "what it sampled is not lost"


def test_a_step_that_fails_at_its_end_takes_nothing_from_the_other_lane(lanes: TwoLanes) -> None:
    """All is built anew while a stream has one step running and one behind it."""
    stream = lanes.launch(("far", 0, 7), lane="streaming")
    behind = lanes.launch(("far", 7, 1), lane="streaming")
    failing = lanes.launch(("near", 0, 7))
    lanes.near.samples[0].fault = RuntimeError("no")
    lanes.near.finish()
    lanes.executor.poll()
    [failed, *done] = lanes.events
    assert isinstance(failed, StepFailed)
    assert failed.step_id == failing
    assert lanes.renewals == 1
    assert [one.step_id for one in done if isinstance(one, StepDone)] == [stream, behind]
    assert len(lanes.tokens("far")) == 2
    assert lanes.tokens("near") == []
    lanes.preempt("near")
    lanes.launch(("near", 0, 7))
    lanes.near.finish()
    lanes.executor.poll()
    assert isinstance(lanes.events[-1], StepDone), "it begins anew"
    assert lanes.tokens("near") == lanes.tokens("far")[:1]


# ---- lanes of a GPU ------------------------------------------------------------------------------


class Stream:
    """A stream that notes what it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waits: list[str] = []

    def record_event(self) -> str:
        return self.name

    def wait_event(self, event: str) -> None:
        self.waits.append(event)


def test_a_lane_waits_for_the_other_when_weights_go_that_this_one_reads() -> None:
    resident, streaming = Stream("resident"), Stream("streaming")
    fence = LaneFence(cast(Any, {"resident": resident, "streaming": streaming}))
    fence.dropped("far")
    reading: dict[str, set[LaneName]] = {"near": {"resident"}, "far": {"streaming"}}
    fence.reading = lambda model: reading.get(model, ())
    fence.dropped("idle")
    assert (resident.waits, streaming.waits, fence.waits) == ([], [], 0)
    fence.dropped("near")
    assert (resident.waits, streaming.waits) == ([], ["resident"]), "it holds nobody up itself"
    fence.dropped("far")
    assert (resident.waits, streaming.waits) == (["streaming"], ["resident"])
    assert fence.waits == 2


def test_one_lane_never_waits() -> None:
    stream = Stream("resident")
    fence = LaneFence(cast(Any, {"resident": stream}))
    fence.reading = lambda _: {"resident"}
    fence.dropped("near")
    assert stream.waits == []


def test_a_load_waits_for_the_resident_lane_and_both_lanes_for_its_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream beside it is not waited for; the fence has the resident lane wait where it must."""
    told: list[tuple[str, str]] = []

    class Engine:
        def submit(self, _: object, stream: Stream, *, urgency: Urgency) -> str:
            told.append((f"submit {urgency.name}", stream.name))
            return "ticket"

        def follow(self, ticket: str, stream: Stream) -> None:
            told.append((ticket, stream.name))

    notifier = SimpleNamespace(watch=lambda ticket: told.append((ticket, "notifier")))
    monkeypatch.setattr(load_transfers, "TicketNotifier", lambda *_: notifier)
    lanes = cast(Any, [Stream("resident"), Stream("streaming")])
    device = torch.device("cuda", 0)
    copies = load_transfers.LoadTransfers(
        cast(Any, Engine()), device, lanes, lambda: None, lambda _: 1
    )
    copies.hold_steps(copies.submit([]))
    assert told == [
        ("submit LOAD", "resident"), ("ticket", "notifier"), ("ticket", "resident"),
        ("ticket", "streaming"),
    ]  # fmt: skip


def test_a_mark_covers_all_lanes_and_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def event(*, blocking: bool) -> Any:
        assert blocking
        return SimpleNamespace(
            record=lambda stream: told.append(f"record {stream}"),
            synchronize=lambda: told.append("wait"),
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "Event", event)
    load = SimpleNamespace(synchronize=lambda: told.append("wait for a load"))
    mark = Mark.of(cast(Any, ["resident", "streaming"]), lambda: [load])
    mark.synchronize()
    assert told == ["record resident", "record streaming", "wait", "wait", "wait for a load"]


def test_contexts_of_a_whole_gpu_share_its_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def context(_device: int, _repository: Any, **fields: Any) -> None:
        made.append(fields)

    for sms, readers, left in (
        (132, {"host": 4, "peer": 32}, 128),
        (16, {"host": 4, "peer": 4}, 12),
    ):
        made.clear()
        properties = SimpleNamespace(multi_processor_count=sms)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, p=properties: p)
        monkeypatch.setattr(gpu_lanes, "LaunchContext", context)
        chooser = SimpleNamespace(readers=lambda: {"host": 4, "peer": 32})
        gpu_lanes.lane_contexts(0, cast(Any, None), cast(Any, chooser), 2)
        assert made == [
            {"spared_sms": 4, "picked_for": left}, {"readers": readers, "picked_for": left},
        ]  # fmt: skip
