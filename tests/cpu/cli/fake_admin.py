"""The admin side of a server, over real sockets, with a catalogue that only pretends."""

import json
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote

import msgspec

from c2cserve.core.model import ModelState, ModelStatus
from c2cserve.runtime.gateway import SliceStatus, Snapshot

GIB = 1 << 30


def model(name: str, **changes: Any) -> ModelStatus:
    base = ModelStatus(
        id=name,
        aliases=(f"{name}-alias",),
        state=ModelState.READY,
        max_context=4096,
        weight_bytes=2 * GIB,
        loaded_bytes=2 * GIB,
        pinned=False,
        priority=0,
    )
    return replace(base, **changes)


def slice_status(name: str, **changes: Any) -> SliceStatus:
    base = SliceStatus(
        id=name, kind="cpu", state="up", pid=1, cpus=(0, 1), restarts=0, running=3, waiting=1,
        active_models=("a",), last_model="a", kv_used_bytes=GIB, kv_total_bytes=4 * GIB, steps=10,
        switches=5, busy_share=0.5, prompt_tokens=100, output_tokens=1000, cached_tokens=0,
        preemptions=0, heartbeat_age_s=0.0,
    )  # fmt: skip
    return replace(base, **changes)


METRICS = """\
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.01",model_name="a"} 50
vllm:time_to_first_token_seconds_bucket{le="0.1",model_name="a"} 100
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="a"} 100
vllm:time_to_first_token_seconds_count{model_name="a"} 100
vllm:time_to_first_token_seconds_sum{model_name="a"} 2.0
# TYPE c2cserve:slo counter
c2cserve:slo_total{met="true",model_name="a"} 95
c2cserve:slo_total{met="false",model_name="a"} 5
"""


class FakeAdmin:
    """Loads take `load_s`; a model whose path contains "broken" fails."""

    def __init__(self, *models: ModelStatus, key: str = "", load_s: float = 0.2) -> None:
        self.models = {one.id: one for one in models}
        self.slices = (slice_status("cpu0"), slice_status("cpu1", state="lost", last_model=""))
        self.key = key
        self.load_s = load_s
        self.entries: list[dict[str, Any]] = []
        self.began: dict[str, float] = {}
        self.output_tokens = 1000
        admin = self

        class Handler(_Handler):
            state = admin

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def find(self, name: str) -> ModelStatus | None:
        for one in self.models.values():
            if name == one.id or name in one.aliases:
                return self._progress(one)
        return None

    def _progress(self, one: ModelStatus) -> ModelStatus:
        if one.id not in self.began:
            return one
        share = (time.monotonic() - self.began[one.id]) / self.load_s
        if share < 1:
            loaded = int(share * one.weight_bytes)
            return replace(one, state=ModelState.LOADING, loaded_bytes=loaded)
        if one.error:
            return replace(one, state=ModelState.FAILED)
        return replace(one, state=ModelState.READY, loaded_bytes=one.weight_bytes)

    def start(self, name: str, error: str = "") -> ModelStatus:
        self.models[name] = model(name, state=ModelState.COLD, loaded_bytes=0, error=error)
        self.began[name] = time.monotonic()
        return self.models[name]

    def snapshot(self) -> Snapshot:
        self.output_tokens += 50
        first = replace(self.slices[0], output_tokens=self.output_tokens)
        return Snapshot(
            instance="test", started_s=time.time() - 7200, draining=False,
            slices=(first, *self.slices[1:]), models=tuple(self.models.values()),
            pool_used_bytes=4 * GIB, pool_budget_bytes=16 * GIB, running=3, waiting=1,
            counters={"slice_lost": 2.0, "rejected_429": 0.0},
        )  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    state: FakeAdmin

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, value: Any) -> None:
        body = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status: int, message: str) -> None:
        self._answer(status, {"error": {"message": message, "type": "x", "param": None}})

    def _allowed(self) -> bool:
        admin = self.state
        if admin.key and self.headers.get("Authorization") != f"Bearer {admin.key}":
            self._error(401, "Incorrect admin key provided")
            return False
        return True

    def do_GET(self) -> None:
        admin = self.state
        if not self._allowed():
            return
        if self.path == "/admin/models":
            self._answer(200, {"models": [admin.find(name) for name in admin.models]})
        elif self.path == "/admin/state":
            self._answer(200, admin.snapshot())
        elif self.path == "/metrics":
            self._answer(200, METRICS)
        else:
            self._one(lambda found: self._answer(200, found))

    def _one(self, then: Any, suffix: str = "") -> None:
        name = unquote(self.path).removeprefix("/admin/models/").removesuffix(suffix)
        found = self.state.find(name)
        if found is None:
            self._error(404, f"The model {name!r} does not exist")
        else:
            then(found)

    def do_POST(self) -> None:
        admin = self.state
        if not self._allowed():
            return
        if self.path.endswith("/reload"):
            self._one(lambda found: self._answer(200, admin.start(found.id)), "/reload")
            return
        entry = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        admin.entries.append(entry)
        if entry["id"] in admin.models:
            self._error(409, f"the name {entry['id']!r} is already used")
            return
        error = "no tensor" if "broken" in str(entry.get("path")) else ""
        self._answer(201, admin.start(entry["id"], error))

    def do_DELETE(self) -> None:
        if self._allowed():
            self._one(lambda found: self._answer(200, {"id": self.state.models.pop(found.id).id}))
