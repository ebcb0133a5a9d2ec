"""Text processes are shared so that costly requests delay no others for long."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_gateway import model_files
from served import BYTE, Served, make_gateway
from small_tokenizers import sentencepiece_like

from c2cserve.server.settings import ServerSettings, TextSettings
from c2cserve.server.text.claims import LARGE_BYTES, LONG_S, REMEMBERED_S, Claim, Sharing

ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"


def small(model: str, since: float = 0.0) -> Claim:
    return Claim(model, model, 1, since)


def large(model: str, since: float = 0.0) -> Claim:
    return Claim(model, model, LARGE_BYTES, since)


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_the_last_process_is_for_small_requests_of_another_model(processes: int) -> None:
    sharing = Sharing(processes)
    texts = [large(f"m{number}") for number in range(processes - 1)]
    assert all(sharing.may_start(texts[-1], texts[:count], 0.0) for count in range(processes - 1))
    assert not sharing.may_start(large("other"), texts, 0.0)
    assert sharing.may_start(small("other"), texts, 0.0)
    same = [small("m") for _ in range(processes - 1)]
    assert not sharing.may_start(small("m"), same, 0.0)
    assert sharing.may_start(small("other"), same, 0.0)


def test_one_process_is_for_all() -> None:
    assert Sharing(1).may_start(large("m"), [], 0.0)


def test_a_model_that_was_slow_is_costly_for_some_time() -> None:
    sharing = Sharing(2)
    sharing.ended(small("slow", since=0.0), LONG_S + 0.1)
    sharing.ended(large("patient", since=0.0), LONG_S + 0.1)
    now = LONG_S + 1.0
    assert not sharing.may_start(small("slow"), [large("m", since=now)], now)
    assert sharing.may_start(small("patient"), [large("m", since=now)], now)
    assert sharing.may_start(small("slow"), [small("m", since=now)], now)
    now += REMEMBERED_S
    assert sharing.may_start(small("slow"), [large("m", since=now)], now)


def test_what_takes_long_is_costly_while_it_runs() -> None:
    sharing = Sharing(2)
    assert sharing.may_start(large("other"), [small("m", since=5.0)], 5.5)
    assert not sharing.may_start(large("other"), [small("m", since=5.0)], 5.1 + LONG_S)


def test_several_endless_templates_delay_the_others_once(
    byte_dir: Path, piece_dir: Path, tmp_path: Path
) -> None:
    """Each model may hold a process until its time limit once; then they share one."""
    endless = sentencepiece_like(tmp_path)
    (endless / "chat_template.jinja").write_text(ENDLESS)
    gateway = make_gateway(byte_dir, piece_dir)
    names = ["a", "b"]
    for name in names:
        gateway.files[name] = model_files(name, endless, vocab=340)
    settings = ServerSettings(text=TextSettings(timeout_s=1.5))
    ended: list[str] = []
    lock = threading.Lock()

    with Served(gateway, settings) as served, ThreadPoolExecutor(16) as threads:

        def hostile(name: str) -> int:
            body = {"model": name, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            status = served.http.post("/v1/chat/completions", json=body, timeout=60).status_code
            with lock:
                ended.append(name)
            return status

        first = [threads.submit(hostile, name) for name in names]
        while not all(one.done() for one in first):
            time.sleep(0.01)
        later = [threads.submit(hostile, name) for name in names]
        while "c2cserve:text_waiting 1.0" not in served.http.get("/metrics").text:
            assert not any(one.done() for one in later), "two ran at the same time"
            time.sleep(0.01)
        served.says([5])
        body = {"model": BYTE, "prompt": "the quick", "max_tokens": 1}
        assert served.http.post("/v1/completions", json=body).status_code == 200
        assert len(ended) == len(names), "it waited for no endless template"
        assert [one.result() for one in (*first, *later)] == [400] * 4
