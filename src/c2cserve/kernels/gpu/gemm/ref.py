"""Every GEMM dataflow in plain torch, tile by tile: what the kernels compute, in their order.

O[M, N] = X[M, K] W[N, K]^T + bias[N], bf16 or fp16 operands, float32 accumulation. Memory is read
and written through `Memory`, which counts every byte. Tiles are slices, so tails clip at a tensor's
end as TMA clips them. Outputs, slots and scratch start as NaN, and each element of O must be stored
exactly once. The result does not depend on the order of loops, as no two tiles share an output.
They have the kernel's order, so that both can be read side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from c2cserve.kernels.gpu.gemm.traffic import BK, BW, Tiles, Traffic, panels, sym_columns


@dataclass(frozen=True, slots=True)
class Result:
    """O [M, N] in X's dtype, and the bytes it took."""

    out: Tensor
    traffic: Traffic


class Memory:
    """O, and a count of the bytes that one GEMM moves over the link and in and out of HBM."""

    def __init__(self, x: Tensor, n: int, bias: Tensor | None) -> None:
        self.out = x.new_full((len(x), n), torch.nan)
        self._bias = x.new_zeros(n) if bias is None else bias
        self._stores = torch.zeros(len(x), n, dtype=torch.int32, device=x.device)
        self._traffic = Traffic()

    def fetch(self, tile: Tensor) -> Tensor:
        """Read a tile of W over the link."""
        self._traffic += Traffic(link_bytes=tile.nbytes)
        return tile

    def load(self, tile: Tensor) -> Tensor:
        """Read a tile from HBM."""
        self._traffic += Traffic(hbm_read_bytes=tile.nbytes)
        return tile

    def fill(self, target: Tensor, value: Tensor) -> None:
        """Write a slot or scratch in HBM."""
        target.copy_(value)
        self._traffic += Traffic(hbm_write_bytes=target.nbytes)

    def reduce(self, target: Tensor, partial: Tensor) -> None:
        """Add a partial sum, in the target's type, to the target in memory, as TMA reduction does.

        Here a sum of two 16-bit floats is rounded to float32 first. This does not change the
        result: float32 has 24 bits, which is at least 2 x 11 + 2.
        """
        target.copy_(target.float() + partial.to(target.dtype).float())
        self._traffic += Traffic(0, target.nbytes, target.nbytes)

    def store(self, row: int, column: int, acc: Tensor) -> None:
        """Store one tile of O: float32 sums plus bias, rounded once."""
        here = (slice(row, row + acc.shape[0]), slice(column, column + acc.shape[1]))
        self.out[here] = (acc + self._bias[here[1]].float()).to(self.out.dtype)
        self._stores[here] += 1
        self._traffic += Traffic(hbm_write_bytes=self.out[here].nbytes)

    def result(self) -> Result:
        assert bool((self._stores == 1).all()), "every element of O is stored exactly once"
        return Result(self.out, self._traffic)


def accumulate(x: Tensor, w: Tensor) -> Tensor:
    """Return float32 sums [rows of x, rows of w] over all columns, in k steps of 64, in order."""
    x, w = x.float(), w.float()
    acc = x.new_zeros(len(x), len(w))
    for k in range(0, x.shape[1], BK):
        acc.addmm_(x[:, k : k + BK], w[:, k : k + BK].T)
    return acc


def check(x: Tensor, w: Tensor, bias: Tensor | None, *, tma: bool) -> None:
    """Raise `ValueError` unless the operands are what the launchers take.

    `w` is [N, K], or [E, N, K] grouped. `tma`: the dataflow reads X and W by tensor map, which
    needs rows that begin at multiples of 16 bytes.
    """
    if x.dtype not in (torch.bfloat16, torch.float16) or w.dtype != x.dtype:
        raise ValueError(f"x and w must both be bfloat16 or both float16, not {x.dtype}, {w.dtype}")
    if x.ndim != 2 or x.shape[1] != w.shape[-1]:
        raise ValueError(f"x [M, K] and w [N, K] do not fit: {[*x.shape]}, {[*w.shape]}")
    if x.stride(1) != 1 or not w.is_contiguous():
        raise ValueError("elements of a row of x, and all of w, must lie next to each other")
    if bias is not None and (bias.shape != w.shape[-2:-1] or bias.dtype != x.dtype):
        raise ValueError(f"bias must be [{w.shape[-2]}] of {x.dtype}")
    if tma and (x.shape[1] % 8 or (len(x) > 1 and x.stride(0) % 8)):
        raise ValueError("K and the row stride of x must be multiples of 8 elements (16 bytes)")


def resident(x: Tensor, w: Tensor, bias: Tensor | None, tiles: Tiles) -> Result:
    """Multiply with cuBLAS, W in HBM."""
    check(x, w, bias, tma=False)
    memory = Memory(x, len(w), bias)
    library_gemm(memory, x, w, 0, 0)
    return memory.result()


def prefetch(x: Tensor, w: Tensor, bias: Tensor | None, tiles: Tiles) -> Result:
    """Copy W into a slot in growing panels. Multiply each with cuBLAS as it arrives."""
    check(x, w, bias, tma=False)
    memory = Memory(x, len(w), bias)
    slot = torch.full_like(w, torch.nan)
    for start, stop in panels(len(w), tiles.panel_rows, tiles.panel_growth):
        memory.fill(slot[start:stop], memory.fetch(w[start:stop]))
        library_gemm(memory, x, slot[start:stop], 0, start)
    return memory.result()


def direct(x: Tensor, w: Tensor, bias: Tensor | None, tiles: Tiles) -> Result:
    """Fetch each W tile once for a cluster. Each of its CTAs multiplies bx rows of X by it."""
    check(x, w, bias, tma=True)
    memory = Memory(x, len(w), bias)
    for row in range(0, len(x), tiles.block_rows):
        for column in range(0, len(w), BW):
            tile = memory.fetch(w[column : column + BW])
            cluster_tile(memory, x, tile, (row, len(x)), column, tiles)
    return memory.result()


def split(x: Tensor, w: Tensor, bias: Tensor | None, tiles: Tiles) -> Result:
    """Divide K among a cluster. Rank r sums its share of the k steps, and sums are added in rank
    order."""
    check(x, w, bias, tma=True)
    memory = Memory(x, len(w), bias)
    steps = -(-x.shape[1] // BK)
    bounds = [rank * steps // tiles.cluster * BK for rank in range(tiles.cluster + 1)]
    for row in range(0, len(x), tiles.bx):
        for column in range(0, len(w), BW):
            acc = x.new_zeros((), dtype=torch.float32)
            for begin, end in pairwise(bounds):
                x_tile = memory.load(x[row : row + tiles.bx, begin:end])
                w_tile = memory.fetch(w[column : column + BW, begin:end])
                acc = acc + accumulate(x_tile, w_tile)
            memory.store(row, column, acc)
    return memory.result()


def tee(x: Tensor, w: Tensor, bias: Tensor | None, tiles: Tiles) -> Result:
    """Do `direct` on the first cluster's rows, and store each W tile in a slot. Multiply all other
    rows with cuBLAS from there."""
    check(x, w, bias, tma=True)
    memory = Memory(x, len(w), bias)
    slot = torch.full_like(w, torch.nan)
    head = min(len(x), tiles.block_rows)
    for column in range(0, len(w), BW):
        tile = memory.fetch(w[column : column + BW])
        memory.fill(slot[column : column + BW], tile)
        cluster_tile(memory, x, tile, (0, head), column, tiles)
    if head < len(x):
        library_gemm(memory, x[head:], slot, head, 0)
    return memory.result()


def ring(x: Tensor, w: Tensor, bias: Tensor | None, tiles: Tiles) -> Result:
    """Copy W panels into a ring of slots. Clusters read them panel by panel."""
    check(x, w, bias, tma=True)
    memory = Memory(x, len(w), bias)
    slots = w.new_full((tiles.slots, tiles.panel_rows, w.shape[1]), torch.nan)
    bounds, filled = panels(len(w), tiles.panel_rows), 0
    for index, (start, stop) in enumerate(bounds):
        while filled < min(index + tiles.slots, len(bounds)):  # as far ahead as slots are free
            first, end = bounds[filled]
            memory.fill(slots[filled % tiles.slots, : end - first], memory.fetch(w[first:end]))
            filled += 1
        panel = slots[index % tiles.slots, : stop - start]
        for row in range(0, len(x), tiles.block_rows):
            for offset in range(0, stop - start, BW):
                tile = memory.load(panel[offset : offset + BW])
                cluster_tile(memory, x, tile, (row, len(x)), start + offset, tiles)
    return memory.result()


def hybrid(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    k_order: Sequence[int] | None = None,
) -> Result:
    """Compute the first share `alpha` of O's columns with `sym`, and the others with `asym`.

    `k_order` is the order in which k panels of `tiles.kp` columns are reduced (default: rising).
    Raises `ValueError` unless it has each panel once. Source: C2CServe, Algorithm 1 (section 5).
    """
    check(x, w, bias, tma=True)
    memory = Memory(x, len(w), bias)
    n_sym = sym_columns(len(w), tiles.alpha)
    alone = replace(tiles, cluster=1)
    for row in range(0, len(x), tiles.bx):
        for column in range(0, n_sym, BW):
            tile = memory.fetch(w[column : column + BW])
            cluster_tile(memory, x, tile, (row, len(x)), column, alone)
    if n_sym < len(w):
        rising = range(-(-x.shape[1] // tiles.kp))
        order = rising if k_order is None else k_order
        if sorted(order) != list(rising):
            raise ValueError(f"k_order must hold each of {len(rising)} k panels once: {order}")
        _weight_stationary(memory, x, w, n_sym, tiles, order)
    return memory.result()


def sym(x: Tensor, w: Tensor, bias: Tensor | None, tiles: Tiles) -> Result:
    """Compute O output-stationary, without multicast: `hybrid` at alpha 1."""
    return hybrid(x, w, bias, replace(tiles, alpha=1.0))


def asym(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    k_order: Sequence[int] | None = None,
) -> Result:
    """Compute O weight-stationary, with partial sums reduced in HBM: `hybrid` at alpha 0."""
    return hybrid(x, w, bias, replace(tiles, alpha=0.0), k_order)


def library_gemm(memory: Memory, x: Tensor, w: Tensor, row: int, column: int) -> None:
    """Do one cuBLAS call. Its tiles are not known, so each operand counts once."""
    memory.store(row, column, accumulate(memory.load(x), memory.load(w)))


def cluster_tile(
    memory: Memory, x: Tensor, tile: Tensor, rows: tuple[int, int], column: int, tiles: Tiles
) -> None:
    """Compute one cluster's output: each CTA's bx rows of X, from rows[0] on, by a W tile [128, K].

    A CTA that begins at rows[1] or later does nothing. The X tile may reach past rows[1]; in
    grouped GEMMs, into the next expert's rows. That part is read and multiplied, but not stored.
    """
    begin, end = rows
    for row in range(begin, min(begin + tiles.block_rows, end), tiles.bx):
        acc = accumulate(memory.load(x[row : row + tiles.bx]), tile)
        memory.store(row, column, acc[: end - row])


def _weight_stationary(
    memory: Memory, x: Tensor, w: Tensor, n_sym: int, tiles: Tiles, k_order: Sequence[int]
) -> None:
    """Compute the columns from n_sym on. A W tile [128, kp] stays in shared memory, while a loop
    over M reduces each output tile."""
    cleared = x.new_zeros((len(x), len(w) - n_sym), dtype=torch.float32)
    if tiles.partial_bytes == 4:
        sums = torch.full_like(cleared, torch.nan)
        memory.fill(sums, cleared)
    else:  # O itself holds the sums: it starts as the bias
        memory.store(0, n_sym, cleared)
        sums = memory.out[:, n_sym:]
    reductions = torch.zeros_like(cleared, dtype=torch.int32)
    for column in range(n_sym, len(w), BW):
        for panel in k_order:
            k = slice(panel * tiles.kp, (panel + 1) * tiles.kp)
            pinned = memory.fetch(w[column : column + BW, k])
            for row in range(0, len(x), tiles.bx):
                partial = accumulate(memory.load(x[row : row + tiles.bx, k]), pinned)
                here = (slice(row, row + tiles.bx), slice(column - n_sym, column - n_sym + BW))
                memory.reduce(sums[here], partial)
                reductions[here] += 1
    assert bool((reductions == len(k_order)).all()), "each k panel is reduced into O exactly once"
    if tiles.partial_bytes == 4:
        memory.store(0, n_sym, memory.load(sums))
