"""A record on the dashboard: the fold of its lines, and its server on a real socket."""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

sys.path.append(str(Path(__file__).parent.parent.parent / "policy"))

from cluster_cases import random_world

from c2cserve.cli.replay import replay as command
from c2cserve.core import actions as act
from c2cserve.core import events as ev
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request, Slo
from c2cserve.core.step import SeqStep, Step
from c2cserve.runtime.record import Record
from c2cserve.runtime.replay import RecordError, RecordLines, replay
from c2cserve.server.dashboard.playback import ReplayRoutes, Span, find_span
from c2cserve.server.dashboard.record_fold import RecordFold
from c2cserve.sim.run import Scenario, simulate
from c2cserve.sim.workload.build import WorkloadSettings
from c2cserve.terminal.output import CliError

SLICE = Slice(
    "gpu0", "gpu", gpu=GpuShare("GPU-1", 132, profile="assumed"), kv_bytes=1 << 24,
    hbm_bytes=1 << 30, link="pcie0", link_bytes_per_s=1000.0,
)  # fmt: skip
A, B = (ModelSpec(name, 4000, 2, 1024, 4096, slo=Slo(1.0, 0.1)) for name in "ab")


def seq(name: str, tokens: int, blocks: tuple[int, ...], *, fresh: bool) -> SeqStep:
    return SeqStep(name, 0, tokens, blocks, fresh, emits=True)


def write_story(path: Path) -> None:
    """One GPU slice: a is loaded and computes, b streams; one request of each, and one refused."""
    controller = Record(path, "controller", "cluster", {"settings": {}})
    worker = Record(path, "gpu0/1", "slice", {"slice": SLICE, "max_in_flight": 2})
    ra, rb = (Request(f"r{one}", one, 20, 3, 10.0, Slo(1.0, 0.1)) for one in "ab")
    late = Request("late", "a", 20, 3, 10.0)
    added = [ev.PoolState(9000), ev.ModelAdded(A), ev.ModelAdded(B), ev.SliceUp(SLICE)]
    controller(9.0, added, [act.Load("a"), act.Load("b")])
    controller(9.5, [ev.ModelLoaded("a", 4000, 0.5)], [act.Activate("a", "gpu0", True)])
    worker(9.6, [ev.Activated(A, True), ev.Activated(B)], [act.Fetch("a")])
    worker(9.8, [ev.Fetched("a", 0.2)], [])
    arrived = [ev.Arrived(ra), ev.Arrived(rb), ev.Arrived(late)]
    sent = [act.Dispatch("ra", "gpu0"), act.Dispatch("rb", "gpu0")]
    controller(10.0, arrived, [*sent, act.Reject("late", 429, "too late", limit="patience")])
    step = Step(1, "a", (seq("ra", 20, (0, 1024), fresh=True),))
    worker(10.1, [ev.Submitted(ra), ev.Submitted(rb)], [act.RunStep(step)])
    done = ev.StepDone(1, (ev.SeqOutcome("ra", 1, False),), 0.1)
    step = Step(2, "b", (seq("rb", 20, (2048, 1024), fresh=True),))
    worker(10.2, [done], [act.RunStep(step)])
    controller(10.2, [ev.FirstToken("ra", 0.2)], [])
    worker(10.3, [ev.StepParked(2)], [])
    done = ev.StepDone(2, (ev.SeqOutcome("rb", 1, True),), 0.5, streamed_bytes=2500)
    worker(11.3, [done], [])
    controller(11.3, [ev.FirstToken("rb", 1.3), ev.Finished("rb", 1)], [])
    controller.close()
    worker.close()


@pytest.fixture
def story(tmp_path: Path) -> Path:
    write_story(tmp_path / "story.jsonl")
    return tmp_path / "story.jsonl"


def fold_of(path: Path) -> RecordFold:
    fold = RecordFold(path.name)
    for _, line in RecordLines(path):
        fold.add(line)
    return fold


def test_slices_models_and_links(story: Path) -> None:
    state = fold_of(story).state()
    (one,) = state.slices
    assert (one.id, one.state, one.model, one.switches) == ("gpu0", "up", "b", 1)
    assert (one.active_models, one.resident_models, one.loading_models) == (("a", "b"), ("a",), ())
    assert (one.running, one.waiting) == (1, 0)
    assert one.kv_used_bytes == 2048, "the other request's blocks are free, but for the shared one"
    assert one.streamed_bytes_per_s == pytest.approx(500.0)
    assert one.loaded_bytes_per_s == pytest.approx(800.0)
    assert one.busy_share == pytest.approx(0.12)
    (link,) = state.links
    assert (link.id, link.bytes_per_s, link.origin) == ("pcie0", 1000.0, "assumed")
    assert link.used_bytes_per_s == pytest.approx(1300.0)
    a, b = state.models
    assert (a.id, a.state, a.pool_bytes, a.resident_slices) == ("a", "ready", 4000, ("gpu0",))
    assert (b.id, b.state, b.pool_bytes, b.resident_slices) == ("b", "loading", 0, ())
    assert (b.judged, b.met, b.ttft_p50_s) == (1, 0, pytest.approx(1.3))


def test_timelines_have_their_phases(story: Path) -> None:
    state = fold_of(story).state()
    by_id = {one.id: one for one in state.requests}
    ra, rb = by_id["ra"], by_id["rb"]
    assert (ra.state, ra.queue_s, ra.switched, ra.switch_s) == ("running", 0.0, False, 0.0)
    assert ra.slice_queue_s == pytest.approx(0.1)
    assert ra.prefill_s == pytest.approx(0.1)
    assert (rb.state, rb.switched, rb.switch_s, rb.met) == ("done", True, None, False)
    assert rb.weights_s == pytest.approx(0.5)
    assert rb.prefill_s == pytest.approx(0.6)
    assert by_id["late"].state == "refused"
    assert state.queue.refused == {"patience": 1}
    assert (state.queue.running, state.queue.waiting) == (1, 0)


@pytest.mark.parametrize("seed", range(6))
def test_any_record_of_a_controller_can_be_shown(tmp_path: Path, seed: int) -> None:
    """Slices die, loads fail, clients leave; at the end nothing is in flight."""
    world = random_world(seed)
    world.run()
    record = Record(tmp_path / "r", "controller", "cluster", {"settings": world.settings})
    for now, events, actions in world.log:
        record(now, events, actions)
    record.close()
    fold = RecordFold("r")
    for _, line in RecordLines(tmp_path / "r"):
        fold.add(line)
        assert fold.state().now_s == fold.now_s
    assert (fold.state().queue.running, fold.state().queue.waiting) == (0, 0)


def test_a_simulation_looks_like_a_server(tmp_path: Path) -> None:
    """All of its requests end, and nothing of them stays on its slices."""
    path = tmp_path / "simulated.jsonl"
    load = WorkloadSettings("synthetic:rate=4,duration=10", limit=20)
    outcome = simulate(Scenario("h200-x1", "llama-3.1-8b*3", load), record=path)
    assert find_span(path).end_s > 0
    state = fold_of(path).state()
    (one,) = state.slices
    assert (one.state, one.running, one.waiting, one.kv_used_bytes) == ("up", 0, 0, 0)
    assert {request.state for request in state.requests} <= {"done", "refused"}
    assert sum(model.judged for model in state.models) > 0
    assert [link.origin for link in state.links] == ["simulated"]
    assert outcome.as_json()
    with pytest.raises(RecordError, match="only replay --dashboard"):
        replay(path)


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    for text in ("", "hello\n", '{"stream":"s","now":1.0,"events":[],"actions":[]}\n'):
        (tmp_path / "r").write_text(text)
        with pytest.raises(RecordError):
            find_span(tmp_path / "r")


@pytest.mark.parametrize("options", [(True, True, None), (False, False, 1), (False, True, 0)])
def test_options_without_an_effect_are_refused(
    tmp_path: Path, options: tuple[bool, bool, int | None]
) -> None:
    """The last ones are right, and lead to a file that is not there."""
    with pytest.raises(CliError, match=r"no effect|cannot be read"):
        command(tmp_path / "none", *options)


# ---- its server ---------------------------------------------------------------------------------


@pytest.fixture
def client(story: Path) -> Iterator[httpx.Client]:
    span = find_span(story)
    assert span == Span(9.0, 11.3)
    app = ReplayRoutes(story, span).app()
    config = uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client
    server.should_exit = True
    thread.join(10)


def events(client: httpx.Client, **asked: str) -> list[dict[str, Any]]:
    text = client.get("/dashboard/events", params=asked).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_the_same_page_is_served(client: httpx.Client) -> None:
    assert 'src="/dashboard/main.js"' in client.get("/dashboard").text
    assert client.get("/dashboard/main.js").headers["content-type"].startswith("text/javascript")
    assert client.get("/dashboard/none.js").status_code == 404
    assert client.get("/dashboard", headers={"host": "evil.example"}).status_code == 403


def test_a_record_is_played_to_its_end(client: httpx.Client) -> None:
    first, *_, last = events(client, speed="100")
    assert first["playback"] == {"begin_s": 9.0, "end_s": 11.3, "speed": 100.0, "over": False}
    assert (first["source"], first["name"], first["now_s"]) == ("record", "story.jsonl", 9.0)
    assert last["playback"]["over"]
    assert last["queue"]["refused"] == {"patience": 1}


def test_a_record_is_played_from_any_time(client: httpx.Client) -> None:
    first, *_ = events(client, at="10.15", speed="100")
    assert first["now_s"] == 10.15
    assert {one["id"]: one["state"] for one in first["requests"]} == {
        "ra": "running", "rb": "running", "late": "refused",
    }  # fmt: skip
    (only,) = events(client, at="1e9")
    assert only["playback"]["over"]


@pytest.mark.parametrize("query", ["at=x", "speed=-1", "speed=nan", "at=inf", "speed=1e9"])
def test_wrong_queries(client: httpx.Client, query: str) -> None:
    assert client.get(f"/dashboard/events?{query}").status_code == 400
