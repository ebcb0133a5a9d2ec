"""An unknown model is answered with the name that was probably meant, among those of the key."""

from typing import Any

import pytest
from served import BYTE, Served

from c2cserve.core.model import ModelState, ModelStatus
from c2cserve.server.model_names import unknown_model


def status(name: str, *aliases: str) -> ModelStatus:
    return ModelStatus(
        id=name, aliases=aliases, state=ModelState.COLD, max_context=1, weight_bytes=1,
        loaded_bytes=0, pinned=False, priority=0,
    )  # fmt: skip


MODELS = [
    status("Qwen/Qwen3-8B", "qwen"),
    status("meta-llama/Llama-3.1-8B-Instruct", "gpt-4o-mini"),
]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("QWEN/qwen3-8b", "Qwen/Qwen3-8B"),
        ("other/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
        ("gpt-4o-mni", "gpt-4o-mini"),
        ("something else", None),
        ("", None),
        ("q" * 100_000, None),
    ],
)
def test_the_name_that_was_meant(name: str, meant: str | None) -> None:
    error = unknown_model(name, MODELS)
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert len(error.message) < 400
    if meant is None:
        assert "did you mean" not in error.message
    else:
        assert error.message.endswith(f"; did you mean {meant!r}?")


def test_every_route_says_it(served: Served) -> None:
    bodies: list[tuple[str, str, Any]] = [
        ("POST", "/v1/completions", {"model": "byte", "prompt": "x"}),
        ("GET", "/v1/models/byte", None),
        ("GET", "/admin/models/byte", None),
    ]
    for method, path, body in bodies:
        answer = served.http.request(method, path, json=body)
        assert answer.status_code == 404
        assert f"did you mean {BYTE!r}?" in answer.json()["error"]["message"]


def test_aliases_are_shown(served: Served) -> None:
    (card,) = [one for one in served.client.models.list() if one.id == BYTE]
    assert card.model_dump()["aliases"] == ["nick"]
    assert served.client.models.retrieve("nick").id == BYTE
