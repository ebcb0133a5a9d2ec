"""LiteLLM's proxy in front of the server, and OpenAI's client in front of the proxy."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
from checks import (
    ANSWER,
    CALLER,
    KEY,
    MESSAGES,
    MODEL,
    PERSON,
    TOOL,
    URL,
    check_city,
    check_person,
    feature,
    same,
)  # fmt: skip

_START_S = 120.0
_MASTER_KEY = f"sk-{secrets.token_hex(24)}"
"""The proxy does not start without one."""
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "p", "strict": True, "schema": PERSON},
}


def _model(name: str) -> dict[str, Any]:
    where = {"model": f"openai/{name}", "api_base": f"{URL}/v1", "api_key": KEY}
    return {"model_name": name, "litellm_params": where}


@contextlib.contextmanager
def proxy() -> Iterator[str]:
    """Run a proxy. The value is its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"  # JSON is YAML
        config.write_text(
            json.dumps({"model_list": [_model(one) for one in (MODEL, CALLER, "chat")]})
        )
        command = [
            str(Path(sys.executable).with_name("litellm")), "--config", str(config),
            "--port", str(port), "--host", "127.0.0.1",
        ]  # fmt: skip
        with (Path(folder) / "log").open("w+b") as log:
            env = {**os.environ, "LITELLM_MASTER_KEY": _MASTER_KEY}
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=env)
            try:
                _await(url, process, Path(folder) / "log")
                yield url
            finally:
                process.kill()
                process.wait()


def _await(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health/liveliness", timeout=5).close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"the proxy did not come up: {log.read_text()[-300:]}")


with proxy() as url:
    api = openai.OpenAI(base_url=f"{url}/v1", api_key=_MASTER_KEY, max_retries=0)

    def models() -> None:
        assert MODEL in {one.id for one in api.models.list()}

    def chat() -> None:
        answer = api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
        same(answer.choices[0].message.content, ANSWER)

    def stream() -> None:
        chunks = list(
            api.chat.completions.create(
                model=MODEL, messages=MESSAGES, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        same("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), ANSWER)
        assert any(c.usage for c in chunks)

    def tools() -> None:
        answer = api.chat.completions.create(
            model=CALLER, messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=300,
            parallel_tool_calls=False,
        )  # fmt: skip
        (call,) = answer.choices[0].message.tool_calls or ()
        check_city(call.function.arguments)

    def structured() -> None:
        answer = api.chat.completions.create(
            model="chat", messages=MESSAGES, response_format=FORMAT, max_tokens=400
        )
        check_person(json.loads(answer.choices[0].message.content or ""))

    def errors() -> None:
        try:
            api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
        except openai.BadRequestError as error:
            assert "temperature" in str(error), error
        else:
            raise AssertionError("no error")

    for check in (models, chat, stream, tools, structured, errors):
        feature(check.__name__, check)
