"""Tokenizers are loaded once, kept within bounds, and their faults are not the client's."""

import json
from dataclasses import replace
from pathlib import Path

from served import BYTE, Served

from c2cserve.server.text.tokenizer import Tokenizer


def test_ids_of_any_size_are_checked(served: Served) -> None:
    for prompt in ([2**40], [[5, 2**63]], [400]):
        for extra in ({}, {"echo": True}):
            body = {"model": BYTE, "prompt": prompt, **extra}
            answer = served.http.post("/v1/completions", json=body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "prompt"


def test_a_broken_tokenizer_is_the_server_s_fault(served: Served, tmp_path: Path) -> None:
    files = replace(served.gateway.files[BYTE], id="broken", path=str(tmp_path))
    served.gateway.files["broken"] = files
    for content in (None, "{"):
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        answer = served.http.post("/v1/completions", json={"model": "broken", "prompt": "x"})
        assert answer.status_code == 503
        assert "tokenizer.json" in answer.json()["error"]["message"]


def test_hashes_belong_to_a_model(byte_dir: Path) -> None:
    one, two, again = (Tokenizer(byte_dir, name) for name in ("one", "two", "one"))
    tokens = list(range(50))
    hashes = one.prefix_hashes(tokens)
    assert len(hashes) == 3, "full blocks only"
    assert hashes == again.prefix_hashes(tokens)
    assert not set(hashes) & set(two.prefix_hashes(tokens))
    assert one.prefix_hashes(tokens[:32]) == hashes[:2], "chained from the front"
    changed = one.prefix_hashes([99, *tokens[1:]])
    assert not set(hashes) & set(changed), "every later block depends on the first"
    assert all(0 <= value < 2**64 for value in hashes)
    assert json.dumps(hashes)
