"""Grammar processes: what their masks say does not depend on them, nor on their ends."""

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from c2cserve.core.request import Grammar
from c2cserve.grammars import child, write
from c2cserve.grammars import outputs as module
from c2cserve.grammars.matching import GrammarFailed, Masks, Matchers, Vocabulary, mask_words
from c2cserve.grammars.messages import Fill
from c2cserve.grammars.outputs import Grammars, Held, Outputs
from c2cserve.grammars.table import write_table

SIZE, ENDS = 100, (2,)
LETTERS = "abcdefghij"
PATTERNS = ["[a-f]{1,9}", "(ab|cd)*e", "g[a-z]*", "[h-j]+(a|b)"]


def ids(text: str) -> list[int]:
    return [LETTERS.index(one) + 3 for one in text]


def text_of(pattern: str) -> str:
    return write.grammar_of(write.regex(pattern))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokens = [b""] * 3 + [one.encode() for one in LETTERS] + [b""] * 87
    return write_table(str(tmp_path_factory.mktemp("table") / "run"), tokens)


@pytest.fixture
def outputs(table: str) -> Iterator[Outputs]:
    made = Outputs(Vocabulary(table, SIZE, ENDS))
    yield made
    made.close()


def expected(table: str, *outputs: tuple[str, str]) -> Masks:
    """Return the masks of patterns after texts, as this process makes them."""
    matchers = Matchers(Vocabulary(table, SIZE, ENDS), 1)
    masks = np.empty((len(outputs), mask_words(SIZE)), np.int32)
    rows = {i: matchers.matcher(text_of(one), ids(text)) for i, (one, text) in enumerate(outputs)}
    matchers.fill(rows, masks)
    return masks


def built(outputs: Outputs, pattern: str, text: str = "") -> Held:
    return outputs.build(text_of(pattern), ids(text)).result()


def end(outputs: Outputs) -> None:
    assert outputs.pid is not None
    os.kill(outputs.pid, signal.SIGKILL)


def test_masks_are_those_of_this_process(outputs: Outputs, table: str) -> None:
    helds = [built(outputs, pattern) for pattern in PATTERNS]
    fill = outputs.begin(helds)
    assert (fill.result() == expected(table, *((one, "") for one in PATTERNS))).all()
    for held, text in zip(helds, ["ab", "cd", "g", "h"], strict=True):
        for token in ids(text):
            held.take(token)
    texts = zip(PATTERNS, ["ab", "cd", "g", "h"], strict=True)
    assert (outputs.begin(helds).result() == expected(table, *texts)).all()


def test_fills_may_be_read_in_any_order_or_not_at_all(outputs: Outputs, table: str) -> None:
    helds = [built(outputs, pattern) for pattern in PATTERNS]
    fills = [outputs.begin([held]) for held in helds]
    del fills[1]
    for at, pattern in ((2, PATTERNS[3]), (0, PATTERNS[0]), (1, PATTERNS[2])):
        assert (fills[at].result() == expected(table, (pattern, ""))).all()


@pytest.mark.parametrize("when", ["before", "between"])
def test_another_process_takes_over(outputs: Outputs, table: str, when: str) -> None:
    helds = [built(outputs, "[a-f]{1,9}", "ab"), built(outputs, "g[a-z]*")]
    outputs.begin(helds).result()
    helds[0].take(ids("c")[0])
    helds[1].take(ids("g")[0])
    if when == "before":
        end(outputs)
    early, late = outputs.begin(helds[:1]), outputs.begin(helds[1:])
    if when == "between":
        end(outputs)
    results = [one.result() for one in (late, early)]
    again = [held.again().result() if held.late else held for held in helds]
    assert any(held.late for held in helds) or when == "between"
    assert not any(mask.any() for mask, held in zip(results, helds[::-1], strict=True) if held.late)
    for at, want in enumerate([("[a-f]{1,9}", "abc"), ("g[a-z]*", "g")]):
        mask = outputs.begin([again[at]]).result()
        if again[at].late:  # its last mask had come before the process ended
            again[at] = again[at].again().result()
            mask = outputs.begin([again[at]]).result()
        assert (mask == expected(table, want)).all()
    assert not any(held.failure or held.strikes for held in again)


def stop(outputs: Outputs) -> None:
    assert outputs.pid is not None
    os.kill(outputs.pid, signal.SIGSTOP)


def test_a_step_does_not_wait_for_a_process_that_stands_still(
    outputs: Outputs, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first one does, and not for long. The process answers again, or it is ended."""
    monkeypatch.setattr(module, "_STEP_PATIENCE_S", 0.1)
    helds = [built(outputs, pattern) for pattern in PATTERNS]
    stop(outputs)
    began_s = time.monotonic()
    for _ in range(200):
        masks = outputs.begin(helds).result()
    assert time.monotonic() - began_s < 5.0
    assert not masks.any()
    assert all(held.late for held in helds)
    assert outputs.pid is not None
    pid, again = outputs.pid, [held.again() for held in helds]
    os.kill(pid, signal.SIGCONT)
    masks = outputs.begin([one.result() for one in again]).result()
    assert (masks == expected(table, *((one, "") for one in PATTERNS))).all()
    assert outputs.pid == pid


def test_a_process_that_stands_still_for_long_is_ended(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STEP_PATIENCE_S", 0.1)
    monkeypatch.setattr(child, "_PATIENCE_S", 3.0)
    outputs = Outputs(Vocabulary(table, SIZE, ENDS))
    held = built(outputs, "g[a-z]*")
    stop(outputs)
    outputs.begin([held]).result()
    held = held.again().result()
    assert (outputs.begin([held]).result() == expected(table, ("g[a-z]*", ""))).all()
    assert outputs.lost == 1
    outputs.close()


@pytest.mark.parametrize("harm", [end, pytest.param(stop, marks=pytest.mark.slow)])
def test_a_grammar_that_stops_processes_fails_alone(
    outputs: Outputs, table: str, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Outputs], None]
) -> None:
    """Those that were asked for beside it are asked for one by one, and get their masks."""
    monkeypatch.setattr(module, "_STEP_PATIENCE_S", 0.1)
    monkeypatch.setattr(child, "_PATIENCE_S", 2.0)
    bad_text, send = text_of("[a-f]{1,9}"), module.send

    def harming(end: socket.socket, message: object) -> None:
        if isinstance(message, Fill) and {one.number for one in message.outputs} & bad:
            if len(message.outputs) == 1:
                select.select([end], [], [], 10.0)  # what was asked before is answered
            harm(outputs)
        send(end, message)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(module, "send", harming)
    helds = [built(outputs, one) for one in ("g[a-z]*", "[a-f]{1,9}", "[h-j]+(a|b)")]
    for _ in range(8):
        bad = {held.number for held in helds if held.grammar == bad_text}
        outputs.begin(helds).result()
        if any(held.failure for held in helds):
            break
        helds = [held.again().result() if held.late else held for held in helds]
    failed = [held for held in helds if held.failure]
    assert [held.grammar for held in failed] == [bad_text]
    assert "do not come" in failed[0].failure
    bad = set()
    others = [held.again().result() for held in helds if not held.failure]
    assert (
        outputs.begin(others).result() == expected(table, ("g[a-z]*", ""), ("[h-j]+(a|b)", ""))
    ).all()


def test_builds_survive_the_end_of_a_process(outputs: Outputs, table: str) -> None:
    built(outputs, "[a-f]{1,9}")
    end(outputs)
    held = built(outputs, "g[a-z]*", "g")
    assert (outputs.begin([held]).result() == expected(table, ("g[a-z]*", "g"))).all()
    assert outputs.lost == 1


def test_a_failure_says_why_and_leaves_no_token(outputs: Outputs) -> None:
    held, other = built(outputs, "[a-f]{1,9}"), built(outputs, "g[a-z]*")
    held.take(ids("g")[0])
    masks = outputs.begin([held, other]).result()
    assert not masks[0].any()
    assert masks[1].any()
    assert "cannot go on" in held.failure
    assert not other.failure
    with pytest.raises(GrammarFailed):
        built(outputs, "[a-f]{1,9}", "g")


def test_a_vocabulary_that_cannot_be_read_fails_its_grammars(tmp_path: Path) -> None:
    outputs = Outputs(Vocabulary(str(tmp_path / "none"), SIZE, ENDS))
    with pytest.raises(GrammarFailed, match="cannot be read"):
        built(outputs, "a")
    outputs.close()


def test_outputs_that_are_gone_are_dropped(outputs: Outputs) -> None:
    held = built(outputs, "a+")
    assert outputs.live == 1
    outputs.begin([held]).result()
    del held
    assert outputs.live == 0


def test_idle_processes_end(table: str, tmp_path: Path) -> None:
    grammars = Grammars()
    pids: list[int | None] = []
    for number in range(6):
        tokens = [b""] * 3 + [f"{one}{number}".encode() for one in LETTERS] + [b""] * 87
        path = write_table(str(tmp_path / "run"), tokens)
        outputs = grammars.of(Grammar("", path, ENDS), SIZE)
        outputs.build(text_of("a0"), []).exception()
        pids.append(outputs.pid)
    running = [pid for pid in pids if pid is not None and Path(f"/proc/{pid}").exists()]
    assert running == pids[2:]
    grammars.close()


def test_the_interpreters_lock_is_free_while_a_vocabulary_is_read(tmp_path: Path) -> None:
    """It is read in another process, and no thread of this one computes meanwhile."""
    tokens = [b""] * 3 + [f"{one:x}".encode() for one in range(30_000)]
    outputs = Outputs(Vocabulary(write_table(str(tmp_path / "run"), tokens), 30_003, ENDS))
    before_s = time.process_time()
    outputs.build(text_of("[0-9]+"), []).result()
    assert time.process_time() - before_s < 0.1
    outputs.close()
