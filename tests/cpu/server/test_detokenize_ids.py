"""Any token ids, not only those that a tokenizer would make: what random models put out."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from detokenizing import continuation, pieces, stream
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.server.text.detokenize import Detokenizer, StopStrings
from c2cserve.server.text.tokenizer import Tokenizer

VOCAB = 300


@pytest.fixture(scope="module", params=["byte", "piece"])
def tokenizer(request: pytest.FixtureRequest, byte_dir: Path, piece_dir: Path) -> Tokenizer:
    return Tokenizer(byte_dir if request.param == "byte" else piece_dir)


IDS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@given(prompt=IDS, output=IDS)
def test_equals_the_full_decode(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> None:
    prompt = [*prompt, *tokenizer.encode("a", special=False)]  # ends with a whole character
    assert stream(tokenizer, prompt, output)[0] == continuation(tokenizer, prompt, output)


@pytest.mark.parametrize("text", [" 你", "👋🏽", "é"])
def test_a_character_begun_in_the_prompt(byte_dir: Path, text: str) -> None:
    tokenizer = Tokenizer(byte_dir)
    ids = tokenizer.encode("a" + text, special=False)
    for border in range(1, len(ids)):
        prompt, output = ids[:border], ids[border:]
        shown = stream(tokenizer, prompt, output)[0]
        assert (tokenizer.decode(prompt).rstrip("\N{REPLACEMENT CHARACTER}") + shown) == "a" + text


@pytest.mark.alone
def test_long_runs_without_text_cost_no_more(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("👋", special=False)[0]

    def cost_s(tokens: Sequence[int]) -> float:
        detokenizer = Detokenizer(tokenizer, tokenizer.encode("a"))
        started = time.process_time()
        for token in tokens:
            detokenizer.add((token,))
        return time.process_time() - started

    for token in (2, half):
        assert cost_s([token] * 20_000) < 1.0


def test_a_token_alone_keeps_its_space(piece_dir: Path) -> None:
    tokenizer = Tokenizer(piece_dir)
    (token,) = tokenizer.encode("world", special=False)
    assert tokenizer.token_text(token) == (" world", list(b" world"))


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    borders=st.lists(st.integers(0, 40), max_size=12),
)
def test_stop_strings_do_not_depend_on_borders(
    text: str, stops: list[str], borders: list[int]
) -> None:
    def run(parts: list[str]) -> tuple[str, bool]:
        matcher = StopStrings(tuple(stops))
        shown = ""
        for part in parts:
            new, stopped = matcher.add(part)
            shown += new
            if stopped:
                return shown, True
        return shown + matcher.finish(), False

    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    expected = (text[: min(ends)[1]], True) if ends else (text, False)
    assert run(pieces(text, borders)) == expected
