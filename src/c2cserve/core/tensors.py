"""What elements a tensor has, and where weights are read."""

from typing import Literal

Dtype = Literal["float32", "float16", "bfloat16"]
HalfDtype = Literal["bfloat16", "float16"]
"""The dtypes that GPU kernels multiply."""
ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

Home = Literal["host", "peer", "hbm"]
"""Where weights are: mapped pinned host memory, another GPU's HBM, this GPU's HBM."""
LinkHome = Literal["host", "peer"]
"""The homes that are read over a link."""
