from random import Random

from hypothesis import given
from hypothesis import strategies as st

from c2cserve.policy.baselines.slinfer.memory import MemoryBooks, lowered, raised, required_bytes

SIZES = st.integers(0, 10**6)
MARKS = st.floats(0.0, 1.0)


def test_equation_2() -> None:
    assert required_bytes([(100, 5), (50, 70)], 20.0, 0, 2.0) == 2 * (100 + 20 + 50 + 70)
    assert required_bytes([(10, 0)], 20.0, 4096, 2.0) == 2 * 4096, "never less than L_min"


@given(SIZES, SIZES, MARKS, SIZES)
def test_up_gives_what_is_required_or_says_no(
    current: int, required: int, mark: float, free: int
) -> None:
    size = raised(current, required, mark, free)
    if size is None:
        assert required > current + free
    else:
        assert required <= size <= max(current, current + free)
        assert size >= current


@given(st.integers(1, 10**6), SIZES, MARKS)
def test_what_was_raised_is_not_lowered_at_once(required: int, current: int, mark: float) -> None:
    size = raised(current, required, mark, 10**9)
    assert size is not None
    if size != current:
        assert lowered(size, required, mark) == size, "no ping-pong at one level of load"
    assert lowered(current, required, mark) <= current


@given(st.integers(0, 10**6))
def test_memory_never_runs_out_and_nobody_waits_for_ever(seed: int) -> None:
    random = Random(seed)
    books: MemoryBooks[int] = MemoryBooks(100)
    held: dict[int, int] = {}  # operation -> bytes
    asked: list[int] = []
    done: list[int] = []
    freeing: list[int] = []
    for number in range(60):
        size = random.randint(1, 40)
        if random.random() < 0.5 and size <= books.free_bytes:
            held[number] = size
            asked.append(number)
            if books.up(size, number):
                done.append(number)
        elif done and random.random() < 0.7:
            gone = done.pop(random.randrange(len(done)))
            books.down(held[gone])
            freeing.append(held.pop(gone))
            asked.remove(gone)
        if freeing and random.random() < 0.5:
            done += books.freed(freeing.pop())
        assert books.budget_bytes == sum(held.values()) <= 100
        assert books.tracked_bytes == sum(held[n] for n in done) + sum(freeing) <= 100
    while freeing:
        done += books.freed(freeing.pop())
    assert not books._station
    assert sorted(done) == sorted(asked)


def test_the_reservation_station_is_first_come_first_served() -> None:
    books: MemoryBooks[str] = MemoryBooks(10)
    assert books.up(10, "a")
    books.down(10)
    assert not books.up(8, "big")
    assert not books.up(2, "small"), "it would fit soon, but came later"
    assert books.freed(3) == []
    assert books.freed(7) == ["big", "small"]
