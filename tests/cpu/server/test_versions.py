"""A model's versions: each with its tokenizer, and requests for one that was replaced."""

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_gateway import Play, model_files
from served import BYTE, Served, make_gateway
from small_tokenizers import sentencepiece_like

from c2cserve.core.model import version_id
from c2cserve.core.request import Job
from c2cserve.runtime.gateway import ModelFiles, Refused, Superseded
from c2cserve.server.settings import RequestLimits, ServerSettings, TextSettings
from c2cserve.server.text.claims import Claim
from c2cserve.server.text.messages import FromText, OpenModel, Target, TextRequest, ToText
from c2cserve.server.text.pipeline import TextProcess
from c2cserve.server.text.pool import TextPool
from c2cserve.server.text.vocabulary import Vocabulary

numbers = itertools.count(2)
"""Numbers for versions, so that no server has seen one in an earlier test."""


@pytest.fixture(autouse=True)
def _models_as_they_were(served: Served) -> Iterator[None]:
    before = dict(served.gateway.files)
    yield
    served.gateway.files = before


def renewed(files: ModelFiles, **fields: Any) -> ModelFiles:
    return replace(files, version=version_id(files.id, next(numbers)), **fields)


def ask(served: Served, path: str = "/v1/completions", **fields: Any) -> tuple[int, str]:
    body: dict[str, Any] = {"model": BYTE, "max_tokens": 1, **fields}
    if path == "/v1/completions":
        body.setdefault("prompt", "the quick")
    answer = served.http.post(path, json=body)
    return answer.status_code, answer.text


def refuse_old(served: Served) -> None:
    """Refuse as the live gateway does."""

    def play(job: Job) -> Play:
        old = job.request.model != served.gateway.files[BYTE].key
        return Play([5], refuse=Superseded() if old else None)

    served.plays(play)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_for_a_replaced_version_is_prepared_again(
    served: Served, piece_dir: Path, stream: bool
) -> None:
    old = served.gateway.files[BYTE]
    new = renewed(old, path=str(piece_dir), vocab_size=340)

    def play(job: Job) -> Play:
        if job.request.model == old.key:
            served.gateway.files[BYTE] = new
            return Play(refuse=Superseded())
        return Play([5])

    served.plays(play)
    status, text = ask(served, stream=stream)
    assert status == 200, text
    first, second = served.gateway.jobs
    assert (first.request.model, second.request.model) == (old.key, new.key)
    assert first.tokens != second.tokens, "each by its version's tokenizer"
    assert not set(first.request.prefix_hashes) & set(second.request.prefix_hashes)


def test_the_name_is_looked_up_once_for_each_preparation(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a request is checked, tokenized and run for one and the same version."""
    names: list[str] = []
    resolve = served.gateway.resolve

    def noted(name: str) -> ModelFiles | None:
        names.append(name)
        return resolve(name)

    monkeypatch.setattr(served.gateway, "resolve", noted)
    assert ask(served)[0] == 200
    assert names == [BYTE]


def test_a_reload_while_a_request_is_tokenized(served: Served) -> None:
    """It is no request for two models, nor for none."""
    new = renewed(served.gateway.files[BYTE])

    def reload() -> None:
        served.gateway.files[BYTE] = new

    served.gateway.files[BYTE] = old = renewed(new, check_tokenizer=reload)
    refuse_old(served)
    status, text = ask(served)
    assert status == 200, text
    assert [job.request.model for job in served.gateway.jobs] == [old.key, new.key]


def test_reloads_without_end_are_a_503(served: Served) -> None:
    served.plays(lambda job: Play(refuse=Superseded()))
    status, text = ask(served)
    assert status == 503
    assert "reloaded again and again" in text
    assert len(served.gateway.jobs) == 8


@pytest.mark.parametrize("found", [1, 2])
def test_files_that_changed_are_refused_and_cost_no_process(served: Served, found: int) -> None:
    """The files change before the tokenizer is read, or while it is read."""
    calls = itertools.count(1)

    def check() -> None:
        if next(calls) == found:
            raise Refused(503, "files changed on disk: tokenizer.json")

    served.gateway.files[BYTE] = renewed(served.gateway.files[BYTE], check_tokenizer=check)
    replaced = _replaced(served)
    assert ask(served)[0] == 503
    assert ask(served)[0] == 200, "it is read again for the next request"
    assert _replaced(served) == replaced
    assert ask(served)[0] == 200


def _replaced(served: Served) -> list[str]:
    lines = served.http.get("/metrics").text.splitlines()
    return [line for line in lines if line.startswith("c2cserve:text_processes_replaced_total{")]


@pytest.mark.parametrize(
    ("path", "field", "given"),
    [
        ("/v1/completions", "prompt", "the quick"),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "the quick"}]),
    ],
)
def test_tokens_that_the_model_has_no_embedding_of(
    served: Served, path: str, field: str, given: object
) -> None:
    served.gateway.files[BYTE] = renewed(served.gateway.files[BYTE], vocab_size=30)
    answer = served.http.post(path, json={"model": BYTE, "max_tokens": 1, field: given})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert f"the tokenizer of '{BYTE}' made token id" in error["message"]


def test_metrics_and_answers_name_the_model_not_its_version(served: Served) -> None:
    served.gateway.files[BYTE] = renewed(served.gateway.files[BYTE])
    status, text = ask(served)
    assert status == 200
    assert f'"model":"{BYTE}"' in text
    assert "#" not in "".join(
        line for line in served.http.get("/metrics").text.splitlines() if line[0] != "#"
    )


# ---- what text processes keep -------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[OpenModel]:
    """What processes are told to open from now on."""
    messages: list[OpenModel] = []
    ask: Callable[..., Any] = TextProcess.ask

    async def noted(self: Any, message: ToText, claim: Claim, limit_s: float) -> FromText:
        if isinstance(message, OpenModel):
            messages.append(message)
        return await ask(self, message, claim, limit_s)

    monkeypatch.setattr(TextProcess, "ask", noted)
    return messages


async def _work(pool: TextPool, files: ModelFiles) -> Vocabulary | None:
    work = TextRequest(
        "completions", b'{"model":"m","prompt":"a"}', Target.of(files), RequestLimits()
    )
    _, vocabulary = await pool.work(work, files, "prompt")
    return vocabulary


def _like(directory: Path, folder: Path) -> Path:
    """A checkpoint with the same tokenizer in a file of its own."""
    shutil.copytree(directory, folder)
    with (folder / "tokenizer.json").open("a") as file:
        file.write(" " * (1 + len(folder.name)))
    return folder


async def test_tokenizers_of_versions_that_are_gone_are_dropped(
    byte_dir: Path, tmp_path: Path, opened: list[OpenModel]
) -> None:
    pool = TextPool(TextSettings(processes=1, tokenizers=2), 64)
    pool.start()
    places = byte_dir, _like(byte_dir, tmp_path / "a"), _like(byte_dir, tmp_path / "bc")
    one, two, other, last = (
        replace(model_files(name, place, vocab=400), version=version)
        for name, version, place in (
            ("m", "m", places[0]), ("m", "m#2", places[0]), ("n", "n", places[1]),
            ("o", "o", places[2]),
        )
    )  # fmt: skip
    try:
        await _work(pool, one)
        await _work(pool, one)
        pool.forget("m")
        for files in (two, other, two, last, other):
            await _work(pool, files)
    finally:
        await pool.close()
    assert [(message.version, message.drop) for message in opened] == [
        ("m", []), ("m#2", ["m"]), ("n", []), ("o", []), ("n", ["n"]),
    ], "n was the least recently used of three"  # fmt: skip


async def test_models_with_equal_files_have_one_tokenizer(
    byte_dir: Path, tmp_path: Path, opened: list[OpenModel]
) -> None:
    """Many more models than a process keeps tokenizers, all of one family: each is opened once in
    each process, without another load, and the server keeps one vocabulary."""
    pool = TextPool(TextSettings(processes=2, tokenizers=1), 64)
    pool.start()
    family = [model_files(f"m{number}", byte_dir, vocab=400) for number in range(8)]
    vocabularies = set[int]()
    try:
        for files in (*family, *family, *family):
            vocabularies.add(id(await _work(pool, files)))
    finally:
        await pool.close()
    assert len(vocabularies) == 1
    assert len(opened) <= 2 * len(family)
    assert not any(message.drop for message in opened)


async def test_a_process_with_few_tokenizers_takes_the_next_one(
    byte_dir: Path, tmp_path: Path, opened: list[OpenModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that follow one another do not all make the same process load: what fits all
    processes together is loaded once."""
    monkeypatch.setattr("c2cserve.server.text.pool._ANOTHER_S", 0.0)
    pool = TextPool(TextSettings(processes=2, tokenizers=2), 64)
    pool.start()
    family = [
        model_files(f"m{n}", _like(byte_dir, tmp_path / ("a" * (n + 1))), vocab=400)
        for n in range(4)
    ]
    try:
        for files in (*family, *family, *family):
            await _work(pool, files)
    finally:
        await pool.close()
    assert [message.version for message in opened] == [files.key for files in family]


def test_one_model_s_versions_together_never_take_the_last_process(
    byte_dir: Path, piece_dir: Path, tmp_path: Path
) -> None:
    """An endless template of the old version and one of the new: others are served."""
    endless = sentencepiece_like(tmp_path)
    template = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    (endless / "chat_template.jinja").write_text(template)
    gateway = make_gateway(byte_dir, piece_dir)
    has_process = threading.Event()
    files = model_files("m", endless, vocab=340)
    gateway.files["m"] = replace(files, check_tokenizer=has_process.set)
    settings = ServerSettings(text=TextSettings(timeout_s=2.0))
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    with Served(gateway, settings) as served, ThreadPoolExecutor() as threads:
        served.says([5])
        old = threads.submit(served.http.post, "/v1/chat/completions", json=body, timeout=30)
        assert has_process.wait(10)
        gateway.files["m"] = renewed(files)
        new = threads.submit(served.http.post, "/v1/chat/completions", json=body, timeout=30)
        while "c2cserve:text_waiting 1.0" not in served.http.get("/metrics").text:
            assert not old.done(), "the new version's request did not wait for the old one's"
            time.sleep(0.01)
        assert ask(served)[0] == 200
        assert not old.done()
        for answer in (old.result(), new.result()):
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "limit_exceeded")
