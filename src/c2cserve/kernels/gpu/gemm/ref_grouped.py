"""The grouped `direct` dataflow in plain torch: rows of X sorted by expert, a W of its own each."""

from itertools import pairwise

from torch import Tensor

from c2cserve.kernels.gpu.gemm.ref import Memory, Result, check, cluster_tile
from c2cserve.kernels.gpu.gemm.traffic import BW, Tiles, check_offsets


def grouped_direct(x: Tensor, w: Tensor, offsets: Tensor, tiles: Tiles) -> Result:
    """O [M, N]: rows offsets[e] up to offsets[e + 1] of x [M, K] times w[e] of w [E, N, K].

    offsets is int32 [E + 1], from 0 to M. Tiles go by expert, block of rows within the expert, n
    tile; W of an expert without rows stays where it is. Raises ValueError when operands do not fit.
    """
    check(x, w, None, tma=True)
    borders: list[int] = offsets.tolist()
    check_offsets(borders)
    if len(borders) != len(w) + 1 or borders[-1] != len(x):
        raise ValueError(f"{len(w)} experts and {len(x)} rows do not fit offsets {borders}")
    memory = Memory(x, w.shape[1], None)
    for expert, (start, stop) in zip(w, pairwise(borders), strict=True):
        for row in range(start, stop, tiles.block_rows):
            for column in range(0, len(expert), BW):
                tile = memory.fetch(expert[column : column + BW])
                cluster_tile(memory, x, tile, (row, stop), column, tiles)
    return memory.result()
