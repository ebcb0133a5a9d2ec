"""What costs a client little and the server much: it is refused, or costs one process that is not
the server's. Liveness, other clients and SIGTERM never wait for it."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from child_processes import children_of
from hostile_requests import ENDLESS, HUGE, ON_REQUEST, Costly, chat, costly, costly_templates
from raw_http import HealthWatch, connect, error, exchange, post
from server_process import SPECIALISTS, ServerProcess, wait_until

MODEL = "sorter-llama"
GOOD = json.dumps(
    {"model": MODEL, "prompt": "sort: dcba", "temperature": 0, "max_tokens": 8, "seed": 1}
).encode()


def hostile() -> dict[str, Costly]:
    return costly(MODEL) | costly_templates("endless", "huge")


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One good model and two whose templates are not."""
    root = tmp_path_factory.mktemp("hostile")
    entries: list[str] = []
    for name, template in ((MODEL, None), ("endless", ENDLESS), ("huge", HUGE)):
        shutil.copytree(SPECIALISTS / MODEL, root / name)
        if template is not None:
            (root / name / "chat_template.jinja").write_text(
                ON_REQUEST.replace("TEMPLATE", template)
            )
        entries.append(f'[[models]]\nid = "{name}"\npath = "{name}"\n')
    (root / "catalog.toml").write_text("\n".join(entries))
    return root / "catalog.toml"


def server(catalog: Path, tmp_path: Path, *args: str) -> ServerProcess:
    return ServerProcess(*args, catalog=catalog, directory=tmp_path / "pool", slices=1)


@pytest.fixture(scope="module")
def patient(catalog: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that no test here harms: its text processes may take a minute."""
    with server(catalog, tmp_path_factory.mktemp("patient"), "--text-timeout", "60") as process:
        yield process


def text_of(body: bytes) -> str:
    return json.loads(body)["choices"][0]["text"]


def test_each_is_refused_by_name(catalog: Path, tmp_path: Path) -> None:
    with server(catalog, tmp_path, "--text-timeout", "5") as process:
        for name, (data, status, param) in hostile().items():
            started = time.monotonic()
            got, headers, body = exchange(process.port, data)
            took_s = time.monotonic() - started
            assert got == status, (name, got, body[:300])
            assert headers["x-request-id"]
            assert error(body)["param"] == param, (name, body[:300])
            assert took_s < 60, (name, took_s)
        assert process.memory_bytes() < 1 << 30
        assert process.get("/health")[0] == 200


@pytest.mark.alone
@pytest.mark.parametrize(
    ("seconds", "p99_s"), [(3, 0.2), pytest.param(10, 0.1, marks=pytest.mark.slow)]
)
def test_health_answers_through_all_of_it(
    catalog: Path, tmp_path: Path, seconds: int, p99_s: float
) -> None:
    with server(catalog, tmp_path, "--text-timeout", "2") as process:
        _, _, good = exchange(process.port, post("/v1/completions", GOOD))
        requests = [data for data, _, _ in hostile().values()]
        until = time.monotonic() + seconds

        def hammer(first: int) -> None:
            number = first
            while time.monotonic() < until:
                exchange(process.port, requests[number % len(requests)])
                number += 1

        hammers = [threading.Thread(target=hammer, args=(3 * i,)) for i in range(6)]
        with HealthWatch(process.port, process.process.pid) as health:
            for thread in hammers:
                thread.start()
            while time.monotonic() < until:
                status, _, body = exchange(process.port, post("/v1/completions", GOOD))
                assert status in (200, 429)
                if status == 200:
                    assert text_of(body) == text_of(good)
            for thread in hammers:
                thread.join()
        assert health.quantile(0.99) <= p99_s, sorted(health.took_s)[-20:]
        assert max(health.took_s) < 1.0
        assert process.memory_bytes() < 2 << 30


@pytest.mark.parametrize("name", ["endless template", "text below the limit"])
def test_sigterm_while_a_prompt_is_read(catalog: Path, tmp_path: Path, name: str) -> None:
    with server(catalog, tmp_path, "--text-timeout", "600") as process:
        data = hostile()[name][0]
        senders = [
            threading.Thread(target=exchange, args=(process.port, data), daemon=True)
            for _ in range(4)
        ]
        idle = text_ticks(process)
        for thread in senders:
            thread.start()
        if name == "endless template":
            busy_text(idle)
        else:  # its work may be too short to be seen
            time.sleep(1.0)
        process.signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.leftovers() == []
        for thread in senders:
            thread.join(60)


def test_a_killed_text_process_is_one_request_s(patient: ServerProcess) -> None:
    others: list[int] = []
    replaced = 'c2cserve:text_processes_replaced_total{reason="broken"}'
    before = patient.metric(replaced)

    def ask() -> None:
        others.append(exchange(patient.port, chat("endless"))[0])

    thread = threading.Thread(target=ask)
    idle = text_ticks(patient)
    thread.start()
    busy = busy_text(idle)
    assert exchange(patient.port, post("/v1/completions", GOOD))[0] == 200
    os.kill(busy, signal.SIGKILL)
    thread.join(60)
    assert others == [500]
    assert exchange(patient.port, post("/v1/completions", GOOD))[0] == 200
    wait_until(lambda: patient.metric(replaced) == before + 1, 60, "the replacement is counted")


def text_ticks(server: ServerProcess) -> dict[int, int]:
    """The CPU time of each text process, once they have started and do nothing."""
    ticks: dict[int, int] = {}

    def idle() -> bool:
        before = dict(ticks)
        pids = children_of(server.process.pid, "c2cserve.server.text.process")
        ticks.update({pid: cpu_ticks(pid) for pid in pids})
        return before == ticks and len(ticks) == 2 and all(map(sleeps, ticks))

    wait_until(idle, 60, "the text processes are idle", poll_s=0.5)
    return ticks


def sleeps(pid: int) -> bool:
    """Whether the process waits. One that imports on a loaded machine may stand still, too."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def busy_text(begun: dict[int, int]) -> int:
    """Wait until a text process has worked since `begun`; return its process id."""
    ticks = os.sysconf("SC_CLK_TCK") // 20
    found: list[int] = []

    def busy() -> bool:
        found[:] = [pid for pid, before in begun.items() if cpu_ticks(pid) >= before + ticks]
        return bool(found)

    wait_until(busy, 60, "a text process works", poll_s=0.01)
    return found[0]


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize("kind", ["one", "many", "trailers"])
def test_headers_without_end(patient: ServerProcess, kind: str) -> None:
    before = patient.memory_bytes()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"content-type: application/json\r\n"
    part = {"one": b"a" * (1 << 20), "many": b"a: b\r\n" * (1 << 18)}.get(kind, b"")
    if kind == "one":
        head += b"x: "
    if kind == "trailers":
        head += b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx: "
        part = b"a" * (1 << 20)
    with connect(patient.port) as connection:
        connection.sendall(head)
        with suppress(OSError):  # closed in the middle, or when all of it was thrown away
            for _ in range(128):  # twice what it may take
                connection.sendall(part)
    assert patient.memory_bytes() - before < 64 << 20
    assert patient.get("/health")[0] == 200


def test_large_headers_have_a_status(patient: ServerProcess) -> None:
    closed = 'c2cserve:http_connections_closed_total{reason="head_too_large"}'
    before = patient.metric(closed)
    for headers in ({"x": "a" * 70_000}, {f"x{i}": "a" for i in range(200)}):
        status, answered, body = exchange(patient.port, post("/v1/completions", GOOD, headers))
        assert status == 431
        assert answered["connection"] == "close"
        assert "--max-headers" in error(body)["message"]
    assert patient.metric(closed) == before + 2
