"""The demo's trained models: small, loadable by transformers, right, and safe with any text."""

import importlib
import itertools
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

SPECIALISTS = Path(__file__).parents[2] / "examples" / "specialists"
CATALOG = tomllib.loads((SPECIALISTS / "catalog.toml").read_text())
MODELS = [entry["id"] for entry in CATALOG["models"]]
BYTES_MAX = 2_000_000
ANSWER_TOKENS_MAX = 48
ODD_TEXTS = (
    "", "naïve café", "你好世界", "👩\u200d👩\u200d👧 🚀", "a\tb\r\n  c", "\x00\x7f\u202e", "مرحبا",
)  # fmt: skip


@pytest.fixture(scope="module")
def tasks() -> Iterator[ModuleType]:
    """The task generators as the demo's client gets them: by path, not from the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SPECIALISTS))
        before = set(sys.modules)
        yield importlib.import_module("tasks")
        for name in set(sys.modules) - before:
            if str(SPECIALISTS) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tokens_of(tokenizer: Any, prompt: Any) -> list[int]:
    """What a server feeds the model for this prompt."""
    if prompt.kind == "completion":
        return list(tokenizer(prompt.text)["input_ids"])
    messages = [{"role": "user", "content": prompt.text}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.inference_mode()
def greedy_texts(model: Any, tokenizer: Any, rows: list[list[int]]) -> list[str | None]:
    """Greedy answers in the order of `rows`; None where the model never ended by itself."""
    answers: list[str | None] = [None] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for width, group in itertools.groupby(order, key=lambda i: len(rows[i])):
        members = list(group)
        ids = torch.tensor([rows[i] for i in members])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids),
            max_new_tokens=ANSWER_TOKENS_MAX, do_sample=False,
        )  # fmt: skip
        for i, made in zip(members, output[:, width:].tolist(), strict=True):
            if tokenizer.eos_token_id in made:
                answers[i] = tokenizer.decode(made[: made.index(tokenizer.eos_token_id)])
    return answers


@pytest.mark.parametrize("name", MODELS)
def test_at_least_98_of_100_held_out_prompts_are_right(tasks: ModuleType, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SPECIALISTS / name)
    model = AutoModelForCausalLM.from_pretrained(SPECIALISTS / name, dtype=torch.float32).eval()
    held_out = tasks.heldout(name, 100, seed=31)
    answers = greedy_texts(model, tokenizer, [tokens_of(tokenizer, p) for p in held_out])
    wrong = [
        (prompt, answer)
        for prompt, answer in zip(held_out, answers, strict=True)
        if answer != prompt.answer
    ]
    assert len(wrong) <= 2, wrong


@pytest.mark.parametrize("name", MODELS)
def test_directory_is_small_and_in_bfloat16(name: str) -> None:
    directory = SPECIALISTS / name
    assert sum(path.stat().st_size for path in directory.iterdir()) <= BYTES_MAX
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(directory / "model.safetensors", framework="pt") as weights:
        assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {"BF16"}  # noqa: SIM118 - safe_open cannot be iterated


@pytest.mark.parametrize("name", MODELS)
def test_any_text_round_trips_within_the_vocabulary(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SPECIALISTS / name)
    vocab_size = json.loads((SPECIALISTS / name / "config.json").read_text())["vocab_size"]
    for text in ODD_TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert all(0 <= token < vocab_size for token in ids)


@pytest.mark.parametrize("name", MODELS)
def test_chat_template_renders_many_turns_and_starts_with_one_bos(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SPECIALISTS / name)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "first 👋"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": "third"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    positions = [text.index(message["content"]) for message in messages]
    assert positions == sorted(positions)
    without = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.startswith(without)
    assert len(text) > len(without), "the generation prompt opens the assistant's turn"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [i for i, token in enumerate(ids) if token == tokenizer.bos_token_id] == [0]


@pytest.mark.parametrize("name", MODELS)
def test_tokenizer_adds_bos_to_a_completion_and_names_the_stop(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SPECIALISTS / name)
    assert tokenizer("ab")["input_ids"][0] == tokenizer.bos_token_id
    generation = json.loads((SPECIALISTS / name / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id


def test_chatter_answers_with_a_system_message_before_the_question() -> None:
    directory = SPECIALISTS / "chatter-qwen2"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    text = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is the capital of France?"},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    rows = [list(tokenizer(text, add_special_tokens=False)["input_ids"])]
    assert greedy_texts(model, tokenizer, rows) == ["Paris"]


@pytest.mark.parametrize("name", MODELS)
def test_held_out_prompts_repeat_by_seed_and_are_not_trained_on(
    tasks: ModuleType, name: str
) -> None:
    held_out = tasks.heldout(name, 300, seed=5)
    assert held_out == tasks.heldout(name, 300, seed=5)
    assert held_out != tasks.heldout(name, 300, seed=6)
    trained = {p.text for p in itertools.islice(tasks.prompts(name, 1, held_out=False), 20_000)}
    assert trained.isdisjoint(p.text for p in held_out)


def test_the_catalogue_names_every_task_and_only_directories_that_exist(tasks: ModuleType) -> None:
    assert sorted(MODELS) == sorted(tasks.MODELS)
    for entry in CATALOG["models"]:
        assert (SPECIALISTS / entry["path"] / "config.json").is_file()
