"""What all plots of `gemm.py`'s results share: colours, published figures, a row of panels."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {
    "resident": "#7f7f7f", "prefetch": "#1f77b4", "direct": "#2ca02c", "split": "#98df8a",
    "tee": "#17becf", "ring": "#9467bd", "grouped": "#bcbd22", "hybrid": "#ff7f0e",
    "sym": "#d62728", "asym": "#e377c2", "pick": "#000000",
}  # fmt: skip
PUBLISHED_MS = {"sym": 16.4, "asym": 4.0}
"""M=10,240, N=16,384, K=4,096 on a whole GH200 (C2CServe, section 3.2)."""


def panels(
    count: int, *, width: float = 5.0, height: float = 4.0, columns: int = 0
) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels, `columns` in a row (0: all of them), each in inches."""
    columns = columns or count
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), layout="constrained", squeeze=False
    )
    for spare in axes.flat[count:]:
        spare.set_axis_off()
    return figure, list(axes.flat[:count])
