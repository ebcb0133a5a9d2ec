"""What goes to the GPU in one piece."""

import numpy as np
import pytest
import torch

from c2cserve.engine.gpu.staging import _bytes


@pytest.mark.parametrize("shape", [(0,), (3, 0), (1,), (1, 1), (2, 3)])
def test_bytes_of_any_shape(shape: tuple[int, ...]) -> None:
    """A step that draws nothing wants no rows: an empty array, as numpy makes it."""
    values = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    if shape == (0,):
        values = np.array([], np.int64)
    assert _bytes(torch.from_numpy(values)).tobytes() == values.tobytes()
