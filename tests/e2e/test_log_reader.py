"""A log whose reader has stopped: a terminal after ctrl-S, a pager, a stuck log driver."""

import fcntl
import os
import signal
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess

_PIPE_BYTES = 4096
"""The smallest pipe: 40 lines of the log fill it."""


@pytest.mark.slow
def test_a_log_that_is_not_read_stops_nothing(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    wrapper = ("bash", "-c", f'exec "$0" "$@" 2>{pipe}')
    body = {"model": "sort", "prompt": "31=", "max_tokens": 1}
    with (
        ServerProcess(directory=tmp_path / "pool", wrapper=wrapper) as server,
        httpx.Client(timeout=60) as client,
    ):
        for _ in range(60):
            answer = client.post(f"{server.url}/v1/completions", json=body)
            assert answer.status_code == 200
        assert server.get("/health", timeout_s=60)[0] == 200
        assert server.metric("c2cserve:log_lines_lost_total") == 0, "they wait for the reader"
        server.signal(signal.SIGTERM)
        assert server.wait(60) == 0
    os.close(reader)
