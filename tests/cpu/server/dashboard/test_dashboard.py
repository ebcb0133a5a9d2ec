"""The dashboard over a real socket: its files, who may see it, and what its stream says."""

import base64
import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_gateway import FakeGateway
from served import BYTE, PIECE, Served, make_gateway

from c2cserve.core.actions import Dispatch, Reject
from c2cserve.core.events import Arrived, Finished, FirstToken, SliceUp
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.request import Request, Slo
from c2cserve.runtime.gateway import Snapshot
from c2cserve.server.app import create_app
from c2cserve.server.dashboard import routes
from c2cserve.server.dashboard.feed import VIEWERS_MAX, Feed
from c2cserve.server.dashboard.live import LiveState, TickTap
from c2cserve.server.settings import ServerSettings

PAGE = Path(routes.__file__).parent / "page"
COMPLETION = {"model": BYTE, "prompt": "hello", "max_tokens": 3}


@pytest.fixture(scope="module")
def locked(byte_dir: Path, piece_dir: Path) -> Iterator[Served]:
    settings = ServerSettings(api_keys=("key-1",), admin_key="ключ")
    with Served(make_gateway(byte_dir, piece_dir), settings) as served:
        yield served


def states(served: Served, count: int) -> list[dict[str, Any]]:
    """Return the first states of a new stream, in the SSE format."""
    found: list[dict[str, Any]] = []
    with served.http.stream("GET", "/dashboard/events", timeout=60) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        kind = ""
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                assert kind == "state"
                found.append(json.loads(value))
                if len(found) == count:
                    break
    return found


# ---- files --------------------------------------------------------------------------------------


def test_parts_of_the_page_that_scripts_name() -> None:
    html = (PAGE / "index.html").read_text()
    scripts = "".join(path.read_text() for path in PAGE.glob("*.js"))
    for name in re.findall(r"part\(\"(\w+)\"\)", scripts):
        assert f'data-part="{name}"' in html
    for name in re.findall(r"byId\(\"(\w+)\"\)", scripts):
        assert f'id="{name}"' in html


# ---- access -------------------------------------------------------------------------------------

PATHS = ("/dashboard", "/dashboard/main.js", "/dashboard/events")


async def test_without_an_admin_key_only_local_peers(byte_dir: Path, piece_dir: Path) -> None:
    settings = ServerSettings(api_keys=("key-1",))
    app = create_app(make_gateway(byte_dir, piece_dir), settings)
    transport = httpx.ASGITransport(app, client=("10.0.0.9", 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in PATHS:
            answer = await client.get(path, headers={"authorization": "Bearer key-1"})
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "local_only"
            assert "/dashboard is for this machine only" in answer.text


@pytest.mark.parametrize("path", PATHS)
def test_names_that_lead_here_and_proxies_are_refused(served: Served, path: str) -> None:
    answer = served.http.get(path, headers={"host": "evil.example"})
    assert answer.json()["error"]["code"] == "host_not_allowed"
    answer = served.http.get(path, headers={"x-forwarded-for": "10.0.0.9"})
    assert answer.json()["error"]["code"] == "local_only"


def basic(password: str) -> bytes:
    return b"Basic " + base64.b64encode(f"anyone:{password}".encode())


@pytest.mark.parametrize("path", PATHS)
def test_with_an_admin_key_nothing_answers_without_it(locked: Served, path: str) -> None:
    wrong = (b"", b"Bearer key-1", basic("key-1"), basic(""), b"Basic ====", b"Basic \xff", b"x")
    for given in wrong:
        answer = locked.http.get(path, headers={"authorization": given})
        assert answer.status_code == 401, given
        assert answer.headers["www-authenticate"].startswith("Basic ")
    for given in (basic("ключ"), b"Bearer " + "ключ".encode()):
        with locked.http.stream("GET", path, headers={"authorization": given}) as answer:
            assert answer.status_code == 200


def test_a_browser_s_password_opens_the_dashboard_only(locked: Served) -> None:
    for path in ("/admin/state", "/metrics", "/v1/models"):
        answer = locked.http.get(path, headers={"authorization": basic("ключ")})
        assert answer.status_code == 401
        assert not answer.headers["www-authenticate"].startswith("Basic")


def test_pages_of_other_sites_open_no_stream(served: Served) -> None:
    for site in ("cross-site", "same-site"):
        answer = served.http.get("/dashboard/events", headers={"sec-fetch-site": site})
        assert answer.json()["error"]["code"] == "origin_not_allowed"
    assert served.http.post("/dashboard/events", json={}).status_code == 405


# ---- the stream ---------------------------------------------------------------------------------


def test_the_stream_begins_with_the_state(served: Served) -> None:
    (state,) = states(served, 1)
    assert (state["v"], state["source"], state["name"]) == (1, "server", "test")
    (one,) = state["slices"]
    assert (one["id"], one["state"], one["running"], one["waiting"]) == ("cpu0", "up", 2, 3)
    assert (one["kv_used_bytes"], one["kv_total_bytes"], one["link"]) == (25, 100, "")
    assert one["resident_models"] is None, "a server does not tell"
    assert {model["id"]: model["pool_bytes"] for model in state["models"]} == {
        BYTE: 1000, PIECE: 1000,
    }  # fmt: skip
    assert (state["pool_used_bytes"], state["pool_budget_bytes"]) == (3000, 9000)
    assert state["queue"]["refused"] == {"rejected_429": 5}
    assert state["playback"] is None


def test_a_change_is_sent_and_no_change_is_not(served: Served) -> None:
    with served.http.stream("GET", "/dashboard/events", timeout=60) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        first = json.loads(next(lines)[6:])
        time.sleep(1.2)  # more than two periods
        served.gateway.draining = True
        second = json.loads(next(lines)[6:])
    assert not first["draining"]
    assert second["draining"], "the states between were equal"


def test_a_stream_s_place_is_free_when_its_client_is_gone(served: Served) -> None:
    held = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(VIEWERS_MAX)]
    for one in held:
        one.sendall(b"GET /dashboard/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"200 OK" in one.recv(1 << 12)
    refused = served.http.get("/dashboard/events")
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    for one in held:
        one.close()
    deadline = time.monotonic() + 30
    while True:
        with served.http.stream("GET", "/dashboard/events") as answer:
            if answer.status_code == 200:
                return
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---- what a server's state is made of -----------------------------------------------------------


def make_state(gateway: FakeGateway) -> tuple[LiveState, TickTap]:
    tap = TickTap()
    return LiveState(gateway, tap), tap


@pytest.fixture
def gateway(byte_dir: Path, piece_dir: Path) -> FakeGateway:
    return make_gateway(byte_dir, piece_dir)


def test_a_request_s_timeline(gateway: FakeGateway) -> None:
    live, tap = make_state(gateway)
    request = Request("r", f"{BYTE}#2", 10, 5, arrival_s=100.0, slo=Slo(1.0, 0.1))
    tap(100.0, [Arrived(request), Arrived(replace(request, id="late"))], [])
    tap(100.5, [], [Dispatch("r", "cpu0"), Reject("late", 429, "too late", limit="patience")])
    state = live.state()
    assert state is not None
    (now, ended) = state.requests
    assert (now.id, now.model, now.state, now.slice) == ("r", BYTE, "running", "cpu0")
    assert (now.queue_s, now.ttft_s, now.met) == (0.5, None, None)
    assert (ended.id, ended.state) == ("late", "refused")
    assert [one.reason for one in state.queue.recent] == ["too late"]
    tap(100.9, [FirstToken("r", 0.8)], [])
    tap(101.1, [Finished("r", 5)], [])
    state = live.state()
    assert state is not None
    done = state.requests[0]
    assert (done.state, done.output_tokens, done.met) == ("done", 5, True)
    assert done.decode_s == pytest.approx(0.3)
    assert done.ttft_s == pytest.approx(0.8)


def test_a_loop_that_starts_anew_loses_no_timeline(gateway: FakeGateway) -> None:
    live, tap = make_state(gateway)
    request = Request("r", BYTE, 10, 5, arrival_s=100.0)
    tap(100.0, [Arrived(request), Arrived(replace(request, id="gone"))], [Dispatch("r", "cpu0")])
    tap.begin_loop()
    tap(100.2, [Arrived(request)], [Dispatch("r", "cpu1")])
    state = live.state()
    assert state is not None
    assert [(one.id, one.slice, one.placed) for one in state.requests] == [("r", "cpu1", 2)]


def test_what_the_slice_measured_is_taken_over(served: Served) -> None:
    """The fake gateway has no controller: its ticks are made up, and the answer is real."""
    served.says([50, 51, 52])
    assert served.http.post("/v1/completions", json=COMPLETION).status_code == 200
    tap = TickTap()
    job = served.job
    tap(1.0, [Arrived(job.request)], [Dispatch(job.request.id, "cpu0")])
    from fake_gateway import TIMING

    tap.answered(job.request.id, TIMING, 3)
    (one,) = tap.timelines.views()
    assert (one.slice_queue_s, one.switch_s, one.weights_s, one.prefill_s) == (
        TIMING.queue_s, TIMING.switch_s, TIMING.wait_weights_s, TIMING.prefill_s,
    )  # fmt: skip
    assert (one.switched, one.output_tokens) == (True, 3)


def test_links_are_used_against_what_was_measured(gateway: FakeGateway) -> None:
    live, tap = make_state(gateway)
    gpu = GpuShare("GPU-1", 132)
    slice_ = Slice(
        "cpu0", "gpu", gpu=gpu, hbm_bytes=1 << 30, link="pcie0", link_bytes_per_s=50e9
    )  # fmt: skip
    tap(1.0, [SliceUp(slice_)], [])
    before = gateway.snapshot()
    streamed = 0

    def snapshot() -> Snapshot:
        one = replace(before.slices[0], weights_streamed_bytes=streamed, weights_peer_bytes=0)
        return replace(before, slices=(one,))

    gateway.snapshot = snapshot  # type: ignore[method-assign]
    live.state()
    time.sleep(0.05)
    streamed = 10**9
    state = live.state()
    assert state is not None
    (link,) = state.links
    assert (link.id, link.slices, link.bytes_per_s) == ("pcie0", ("cpu0",), 50e9)
    assert link.origin == "measured"
    assert 0 < link.used_bytes_per_s <= 10**9 / 0.05


def test_a_defect_of_the_tap_ends_the_timelines_and_no_more(gateway: FakeGateway) -> None:
    live, tap = make_state(gateway)
    tap(1.0, [Arrived(None)], [])  # type: ignore[arg-type]
    tap(2.0, [Arrived(Request("r", BYTE, 1, 1, 2.0))], [])
    state = live.state()
    assert state is not None
    assert "timelines ended" in state.trouble
    assert state.requests == ()


async def test_streams_end_with_the_server(gateway: FakeGateway) -> None:
    live, tap = make_state(gateway)
    feed = Feed(live.state, period_s=0.01)
    events = feed.events()
    assert (await anext(events)).startswith(b"retry")
    assert (await anext(events)).startswith(b"event: state")
    tap.closed = True
    assert [one async for one in events] == []
    assert feed.viewers == 0


async def test_a_sample_that_fails_ends_streams_and_the_next_begins(gateway: FakeGateway) -> None:
    live, _ = make_state(gateway)
    failing = False

    def sample() -> Any:
        assert not failing
        return live.state()

    feed = Feed(sample, period_s=0.01, keepalive_s=30)
    events = feed.events()
    await anext(events)
    await anext(events)
    failing = True
    assert [one async for one in events] == []
    failing = False
    again = feed.events()
    await anext(again)
    assert (await anext(again)).startswith(b"event: state")
    await again.aclose()


async def test_an_idle_stream_says_that_it_lives(gateway: FakeGateway) -> None:
    live, _ = make_state(gateway)
    feed = Feed(live.state, period_s=5, keepalive_s=0.01)
    events = feed.events()
    assert [(await anext(events))[:1] for _ in range(3)] == [b"r", b"e", b":"]
    await events.aclose()
