"""Text of a growing output: exact, whatever the borders of tokens, characters and stop strings."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from detokenizing import continuation, pieces, stream
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.server.text.detokenize import Detokenizer, StopStrings
from c2cserve.server.text.tokenizer import Tokenizer

TEXTS = [
    "the quick brown fox",
    " leading and  double  spaces ",
    "你好世界 日本語 emoji 👋🏽 👩‍👩‍👧 done",
    "größe naïve café\n\ttabs and\r\nlines",
    "\N{REPLACEMENT CHARACTER} a real replacement character \N{REPLACEMENT CHARACTER}",
    "áéí combining, \u202e right to left",
]


@pytest.fixture(scope="module", params=["byte", "piece"])
def tokenizer(request: pytest.FixtureRequest, byte_dir: Path, piece_dir: Path) -> Tokenizer:
    return Tokenizer(byte_dir if request.param == "byte" else piece_dir)


def test_models_of_one_file_have_views_of_their_own(byte_dir: Path) -> None:
    one = Tokenizer.load(byte_dir, "one", {})
    special = next(piece for number, piece in one._pieces.items() if number in one._specials)
    for marks in (frozenset[str](), frozenset({special})):
        assert one.showing(marks) is one.showing(marks)
        other = Tokenizer.load(byte_dir, "other", {one.digest: one})
        view = other.showing(marks)
        assert isinstance(view, Tokenizer)
        assert view._salt == other._salt != one._salt
        assert view.showing(frozenset()) is view, "what a view shows it shows further on"


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("group", [1, 2, 5])
def test_known_texts(tokenizer: Tokenizer, text: str, group: int) -> None:
    prompt = tokenizer.encode("the answer is")
    output = tokenizer.encode(text, special=False)
    whole, _ = stream(tokenizer, prompt, output, group)
    assert whole == continuation(tokenizer, prompt, output)
    assert text.strip() in whole


@given(text=st.text(max_size=60), prompt=st.text(min_size=1, max_size=20), group=st.integers(1, 4))
def test_any_text_comes_out_whole(tokenizer: Tokenizer, text: str, prompt: str, group: int) -> None:
    before = tokenizer.encode(prompt)
    output = tokenizer.encode(text, special=False)
    whole, _ = stream(tokenizer, before, output, group)
    assert whole == continuation(tokenizer, before, output)


def test_no_half_character_is_ever_shown(tokenizer: Tokenizer) -> None:
    output = tokenizer.encode("你好👋🏽 日本語 x", special=False)
    _, parts = stream(tokenizer, tokenizer.encode("a"), output)
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert len([part for part in parts if part]) > 3, "it does stream"


def test_special_tokens_are_not_shown(byte_dir: Path) -> None:
    tokenizer = Tokenizer(byte_dir)
    output = [*tokenizer.encode("the", special=False), 3, *tokenizer.encode(" fox", special=False)]
    whole, _ = stream(tokenizer, tokenizer.encode("a"), [*output, 2])
    assert whole == "the fox"


def test_a_space_that_belongs_to_the_output_stays(piece_dir: Path) -> None:
    tokenizer = Tokenizer(piece_dir)
    output = tokenizer.encode("world", special=False)
    assert stream(tokenizer, tokenizer.encode("hello"), output)[0] == " world"


def test_cut_in_the_middle_of_a_character(byte_dir: Path) -> None:
    tokenizer = Tokenizer(byte_dir)
    output = tokenizer.encode("é👋", special=False)[:-1]
    whole, _ = stream(tokenizer, tokenizer.encode("a"), output)
    assert whole == "é\N{REPLACEMENT CHARACTER}"


@pytest.mark.alone
def test_cost_per_token_does_not_grow(byte_dir: Path) -> None:
    tokenizer = Tokenizer(byte_dir)
    draw = random.Random(5)
    output = [draw.randrange(5, 300) for _ in range(20_000)]
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("a"))

    def cost_s(tokens: list[int]) -> float:
        started = time.process_time()
        for token in tokens:
            detokenizer.add((token,))
        return time.process_time() - started

    early = cost_s(output[:5000])
    cost_s(output[5000:15000])
    assert cost_s(output[15000:]) < 3 * early + 0.05


# ---- stop strings -------------------------------------------------------------------------------


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    found = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(found)], True) if found else (text, False)


@given(
    text=st.text("ab", max_size=30),
    stop=st.text("ab", min_size=1, max_size=5),
    borders=st.lists(st.integers(0, 40), max_size=12),
)
def test_one_stop_string_cuts_like_the_whole_text(text: str, stop: str, borders: list[int]) -> None:
    stops = StopStrings((stop,))
    shown, stopped = "", False
    for part in pieces(text, borders):
        new, stopped = stops.add(part)
        shown += new
        if stopped:
            break
    if not stopped:
        shown += stops.finish()
    assert (shown, stopped) == cut(text, (stop,))


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    borders=st.lists(st.integers(0, 40), max_size=12),
)
def test_several_stop_strings_show_nothing_of_any(
    text: str, stops: list[str], borders: list[int]
) -> None:
    """Whichever is complete first ends the text, and no stop string is ever shown."""
    matcher = StopStrings(tuple(stops))
    shown, stopped = "", False
    for part in pieces(text, borders):
        new, stopped = matcher.add(part)
        shown += new
        if stopped:
            break
    if not stopped:
        shown += matcher.finish()
    assert text.startswith(shown)
    assert stopped == any(stop in text for stop in stops)
    assert not any(stop in shown for stop in stops)


def test_text_that_can_not_begin_a_stop_string_is_shown_at_once() -> None:
    stops = StopStrings(("STOP",))
    assert stops.add("hello S") == ("hello ", False)
    assert stops.add("T") == ("", False)
    assert stops.add("x") == ("STx", False)
