import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.policy.cluster.quantify import UNKNOWN, Learned, Line, StepTable

BATCHES = [1, 2, 4, 8, 16]
LENGTHS = [512, 1024, 2048]


@st.composite
def tables(draw: st.DrawFn) -> tuple[StepTable, dict[tuple[int, int], float]]:
    """Samples that never fall with the batch or the length, as measured ones."""
    samples: dict[tuple[int, int], float] = {}
    step = st.floats(0.0, 0.05)
    for j, length in enumerate(LENGTHS):
        for i, batch in enumerate(BATCHES):
            left = samples[length, BATCHES[i - 1]] if i else 0.001
            above = samples[LENGTHS[j - 1], batch] if j else 0.001
            samples[length, batch] = max(left, above) + draw(step)
    prefill = [(1, 0.02), (128, 0.03), (1024, 0.1)]
    decode = [(length, batch, s) for (length, batch), s in samples.items()]
    return StepTable(prefill, decode), samples


@given(tables())
def test_samples_are_met(drawn: tuple[StepTable, dict[tuple[int, int], float]]) -> None:
    table, samples = drawn
    for (length, batch), seconds in samples.items():
        assert table.decode_s(batch, length) == pytest.approx(seconds)


@given(tables(), st.integers(1, 16), st.floats(512, 2048))
def test_between_samples_it_stays_between_the_four_nearest(
    drawn: tuple[StepTable, dict[tuple[int, int], float]], batch: int, length: float
) -> None:
    table, samples = drawn
    low = max(b for b in BATCHES if b <= batch)
    high = min(b for b in BATCHES if b >= batch)
    short = max(x for x in LENGTHS if x <= length)
    long = min(x for x in LENGTHS if x >= length)
    got = table.decode_s(batch, length)
    assert samples[short, low] - 1e-9 <= got <= samples[long, high] + 1e-9


@given(tables(), st.integers(1, 8), st.floats(1, 2048), st.integers(0, 8), st.floats(0, 9000))
def test_more_work_never_takes_less(
    drawn: tuple[StepTable, dict[tuple[int, int], float]],
    batch: int, length: float, more: int, longer: float,
) -> None:  # fmt: skip
    table, _ = drawn
    here = table.decode_s(batch, length)
    assert table.decode_s(batch + more, length) >= here - 1e-9
    assert table.decode_s(batch, length + longer) >= here - 1e-9
    assert table.prefill_s(int(length + longer)) >= table.prefill_s(int(length))


def test_prefill_is_interpolated_and_continued() -> None:
    table = StepTable([(100, 0.1), (200, 0.3)], [(512, 1, 0.02)])
    assert table.prefill_s(150) == pytest.approx(0.2)
    assert table.prefill_s(300) == pytest.approx(0.5)
    assert table.prefill_s(10) == pytest.approx(0.1)


@pytest.mark.parametrize("samples", [[], [(1, 0.1), (1, 0.2)]])
def test_a_line_needs_samples(samples: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="samples"):
        Line(samples)


def test_what_is_unknown_takes_for_ever() -> None:
    assert UNKNOWN.decode_s(1, 10) == UNKNOWN.prefill_s(1) == float("inf")
    assert UNKNOWN.decode_s(0, 0) == UNKNOWN.prefill_s(0) == 0.0
    assert Learned(0.02, 0.001).prefill_s(50) == pytest.approx(0.05)


def test_prompts_without_a_cost_of_their_own_are_known() -> None:
    """Their arithmetic is hidden where steps wait for weights."""
    times = Learned(0.02, 0.0)
    assert times.measured
    assert times.prefill_s(500) == 0.0
    assert times.decode_s(1, 10) == 0.02
