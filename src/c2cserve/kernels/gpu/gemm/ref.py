"""Every GEMM dataflow in plain torch, tile by tile: what the kernels compute, in their order.

O[M, N] = X[M, K] W[N, K]^T + bias[N], bf16 or fp16 operands, float32 accumulation. Memory is read
and written through `Memory`, which counts every byte; tiles are slices, so tails clip at a tensor's
end as TMA clips them. Outputs, slots and scratch start as NaN, and each element of O must be stored
exactly once. Loops stand in the kernel's order, which is not needed for the result (no two tiles
share an output) but makes them readable side by side.
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
    """O, and a count of what one GEMM moves over the link and in and out of HBM."""

    def __init__(self, x: Tensor, n: int, bias: Tensor | None) -> None:
        self.out = x.new_full((len(x), n), torch.nan)
        self._bias = x.new_zeros(n) if bias is None else bias
        self._stores = torch.zeros(len(x), n, dtype=torch.int32, device=x.device)
        self._traffic = Traffic()

    def fetch(self, tile: Tensor) -> Tensor:
        """Bytes of W over the link."""
        self._traffic += Traffic(link_bytes=tile.nbytes)
        return tile

    def load(self, tile: Tensor) -> Tensor:
        """Bytes out of HBM."""
        self._traffic += Traffic(hbm_read_bytes=tile.nbytes)
        return tile

    def fill(self, target: Tensor, value: Tensor) -> None:
        """Bytes into a slot or scratch in HBM."""
        target.copy_(value)
        self._traffic += Traffic(hbm_write_bytes=target.nbytes)

    def reduce(self, target: Tensor, partial: Tensor) -> None:
        """TMA reduction: a partial sum in the target's type is added where the target lies.

        Rounding a sum of two 16-bit floats to float32 first does not change where it ends up: 24
        bits are at least twice 11 and two more.
        """
        target.copy_(target.float() + partial.to(target.dtype).float())
        self._traffic += Traffic(0, target.nbytes, target.nbytes)

    def store(self, row: int, column: int, acc: Tensor) -> None:
        """One tile of O: float32 sums plus bias, rounded once."""
        here = (slice(row, row + acc.shape[0]), slice(column, column + acc.shape[1]))
        self.out[here] = (acc + self._bias[here[1]].float()).to(self.out.dtype)
        self._stores[here] += 1
        self._traffic += Traffic(hbm_write_bytes=self.out[here].nbytes)

    def result(self) -> Result:
        assert bool((self._stores == 1).all()), "every element of O is stored exactly once"
        return Result(self.out, self._traffic)


def accumulate(x: Tensor, w: Tensor) -> Tensor:
    """Float32 sums [rows of x, rows of w] over all columns, k steps of 64 in order."""
    x, w = x.float(), w.float()
    acc = x.new_zeros(len(x), len(w))
    for k in range(0, x.shape[1], BK):
        acc.addmm_(x[:, k : k + BK], w[:, k : k + BK].T)
    return acc


def check(x: Tensor, w: Tensor, bias: Tensor | None, *, tma: bool) -> None:
    """Raise ValueError unless the operands are what the launchers take.

    `w` is [N, K], or [E, N, K] grouped. `tma`: the dataflow reads X and W by tensor map, which
    needs rows that begin on 16 bytes.
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
    """cuBLAS with W in HBM."""
    check(x, w, bias, tma=False)
    memory = Memory(x, len(w), bias)
    library_gemm(memory, x, w, 0, 0)
    return memory.result()


def prefetch(x: Tensor, w: Tensor, bias: Tensor | None, tiles: Tiles) -> Result:
    """Copy engine brings W in growing panels into a slot; cuBLAS on each as it arrives."""
    check(x, w, bias, tma=False)
    memory = Memory(x, len(w), bias)
    slot = torch.full_like(w, torch.nan)
    for start, stop in panels(len(w), tiles.panel_rows, tiles.panel_growth):
        memory.fill(slot[start:stop], memory.fetch(w[start:stop]))
        library_gemm(memory, x, slot[start:stop], 0, start)
    return memory.result()


def direct(x: Tensor, w: Tensor, bias: Tensor | None, tiles: Tiles) -> Result:
    """Each W tile is fetched once a cluster and meets the bx rows of X of each of its CTAs."""
    check(x, w, bias, tma=True)
    memory = Memory(x, len(w), bias)
    for row in range(0, len(x), tiles.block_rows):
        for column in range(0, len(w), BW):
            tile = memory.fetch(w[column : column + BW])
            cluster_tile(memory, x, tile, (row, len(x)), column, tiles)
    return memory.result()


def split(x: Tensor, w: Tensor, bias: Tensor | None, tiles: Tiles) -> Result:
    """The cluster along K: rank r sums its share of the k steps; sums meet in rank order."""
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
    """`direct` on the first cluster's rows keeps each W tile in a slot; cuBLAS does the rest."""
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
    """Copies fill a ring of slots with W panels; clusters consume them panel by panel."""
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
    """The paper's Algorithm 1: the first share `alpha` of O's columns `sym`, the others `asym`.

    `k_order` is the order in which k panels of `tiles.kp` columns are reduced (default: rising);
    ValueError unless it names each once. Source: C2CServe, section 5.
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
    """Output-stationary without multicast: `hybrid` at alpha 1."""
    return hybrid(x, w, bias, replace(tiles, alpha=1.0))


def asym(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    k_order: Sequence[int] | None = None,
) -> Result:
    """Weight-stationary, partial sums reduced in HBM: `hybrid` at alpha 0."""
    return hybrid(x, w, bias, replace(tiles, alpha=0.0), k_order)


def library_gemm(memory: Memory, x: Tensor, w: Tensor, row: int, column: int) -> None:
    """One cuBLAS call: how it tiles is its own affair, so each operand counts once."""
    memory.store(row, column, accumulate(memory.load(x), memory.load(w)))


def cluster_tile(
    memory: Memory, x: Tensor, tile: Tensor, rows: tuple[int, int], column: int, tiles: Tiles
) -> None:
    """One cluster's output: every CTA's bx rows of X, from rows[0] on, against a W tile [128, K].

    A CTA that begins at rows[1] or later does nothing. The X tile may reach past rows[1] (in
    grouped GEMMs, into the next expert's rows): it is read and multiplied, and not stored.
    """
    begin, end = rows
    for row in range(begin, min(begin + tiles.block_rows, end), tiles.bx):
        acc = accumulate(memory.load(x[row : row + tiles.bx]), tile)
        memory.store(row, column, acc[: end - row])


def _weight_stationary(
    memory: Memory, x: Tensor, w: Tensor, n_sym: int, tiles: Tiles, k_order: Sequence[int]
) -> None:
    """Columns from n_sym on: W tile [128, kp] pinned, loop over M, a reduction per output tile."""
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
