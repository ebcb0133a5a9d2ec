"""What a trace of the CPU's thread pool is summed up to."""

import pytest
import torch
from cpu_trace import per_call

US = 1000


def call(parts: int, begin: int, end: int, *threads: tuple[int, int]) -> list[int]:
    return [parts, *(US * at for at in (begin, end, *(at for one in threads for at in one)))]


@pytest.mark.parametrize("last", [2, 1])
def test_calls_of_a_layer_are_told_apart(last: int) -> None:
    """The last layer may have fewer of them."""
    layers = 4
    step: list[list[int]] = []
    for at in range(10, 10 + 100 * layers, 100):
        step += [
            call(2, at, at + 20, (at + 1, at + 11), (at + 2, at + 19)),
            call(7, at + 25, at + 85, (at + 25, at + 80), (0, 0)),
        ]
    step = step[: len(step) - 2 + last]
    first, second = per_call(torch.tensor([step, step]), layers)
    assert first == {
        "call": 0, "parts": 2, "threads": 2, "alone_us": 15.0, "whole_us": 20.0,
        "first_end_us": 11.0, "mean_end_us": 15.0, "last_end_us": 19.0, "busy": 0.68,
    }  # fmt: skip
    assert second == {
        "call": 1, "parts": 7, "threads": 1, "alone_us": 5.0, "whole_us": 60.0,
        "first_end_us": 55.0, "mean_end_us": 55.0, "last_end_us": 55.0, "busy": 0.46,
    }  # fmt: skip
