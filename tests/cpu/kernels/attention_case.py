"""A batch for attention with a known answer, and traps around all that it must not touch."""

from dataclasses import dataclass, fields, replace

import torch
from interpreted import DEVICE
from torch import Tensor
from triton_case import close, noise

from c2cserve.kernels.gpu.attention.flash import Flash
from c2cserve.kernels.gpu.attention.paged import Arrivals, attend
from c2cserve.kernels.gpu.attention.rope import rope_store
from c2cserve.kernels.layer import (
    BLOCK_TOKENS,
    KvLayout,
    Layer,
    LayerShape,
    LayerWeights,
    Mlp,
    TokenRows,
)
from c2cserve.kernels.ref import RefOps, read_block, write_token

LAYER = 1
REF = RefOps()
ARRIVALS = Arrivals(DEVICE)
"""One for all: whoever leaves a count behind spoils what comes after."""
_NOTHING = torch.empty(0)


def layer_of(
    kv: KvLayout, heads: int, window: int = 0, norms: tuple[Tensor, Tensor] | None = None
) -> Layer:
    """All that attention asks of one."""
    mlp = Mlp(_NOTHING, None, _NOTHING, None)
    weights = LayerWeights(
        _NOTHING, _NOTHING, None, norms, _NOTHING, None, _NOTHING, mlp, window
    )  # fmt: skip
    shape = LayerShape(kv, 8, heads, 1e-5, float(kv.head_dim**-0.5))
    return Layer(LAYER, weights, shape)


@dataclass
class Case:
    """Sequences (new tokens, tokens in all) whose caches lie scattered over an arena that is NaN
    wherever nothing was stored, for both layouts of keys. New tokens are not stored yet."""

    lengths: list[tuple[int, int]]
    heads: int
    kv: KvLayout
    dtype: torch.dtype = torch.float16
    window: int = 0
    norm: bool = False
    seed: int = 0
    flash: Flash | None = None

    def __post_init__(self) -> None:
        kv = self.kv
        counts = [-(-length // BLOCK_TOKENS) for _, length in self.lengths]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(self.seed))
        table = torch.full((len(counts), max(counts)), -(2**40))
        size = len(order) * kv.block_bytes
        self.arena = torch.full((size,), 255, dtype=torch.uint8)
        self.reference = self.arena.clone()
        places: list[int] = []
        slots: list[int] = []
        used = 0
        for s, (count, (new, length)) in enumerate(zip(counts, self.lengths, strict=True)):
            table[s, :count] = order[used : used + count] * kv.block_bytes
            used += count
            self._fill(table[s], s, length - new)
            places += range(length - new, length)
            blocks = table[s].tolist()
            slots += [
                blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
                for at in range(length - new, length)
            ]
        self.rows = TokenRows(
            positions=torch.tensor(places).int(),
            q_start=torch.tensor([0] + [new for new, _ in self.lengths]).cumsum(0).int(),
            context_len=torch.tensor([length for _, length in self.lengths]).int(),
            block_table=table,
            slots=torch.tensor(slots),
        )
        dim = kv.head_dim
        width = (self.heads + 2 * kv.kv_heads) * dim
        self.qkv = noise(len(places), width, seed=self.seed + 1).to(self.dtype)
        angles = noise(max(places) + 1, dim // 2, seed=self.seed + 2) * 9
        self.rope = angles.cos(), angles.sin()
        norms = (noise(dim, seed=2) / 4 + 1, noise(dim, seed=3) / 4 + 1) if self.norm else None
        self.layer = layer_of(kv, self.heads, self.window, norms)

    def _fill(self, table: Tensor, seq: int, length: int) -> None:
        kv, random = self.kv, torch.Generator().manual_seed(77 * self.seed + seq)
        for i in range(0, length, BLOCK_TOKENS):
            at, count = int(table[i // BLOCK_TOKENS]), min(BLOCK_TOKENS, length - i)
            planes = self.arena[at : at + kv.block_bytes].view(self.dtype)
            mine = planes.view(kv.layers, 2, kv.kv_heads, BLOCK_TOKENS, kv.head_dim)[LAYER]
            values = torch.randn(2, kv.kv_heads, count, kv.head_dim, generator=random)
            mine[:, :, :count] = values.to(self.dtype)
            for t in range(count):
                slot = at * BLOCK_TOKENS + t
                write_token(self.reference, kv, LAYER, slot, mine[0, :, t], mine[1, :, t])

    def run(self, seqs: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """The kernels' answer for some of the sequences, as one batch, and the arena after it."""
        rows = self.on_device(list(range(len(self.lengths))) if seqs is None else seqs)
        qkv = self.qkv[self._tokens(seqs)].to(DEVICE)
        arena = self.arena.to(DEVICE, copy=True)
        out = attend(qkv, on_device(self.layer), rows, self.rope_there, arena, ARRIVALS, self.flash)
        assert not ARRIVALS.hold(1).any()
        return out.cpu(), arena.cpu()

    def _tokens(self, seqs: list[int] | None) -> list[int]:
        starts = self.rows.q_start.tolist()
        chosen = range(len(self.lengths)) if seqs is None else seqs
        return [token for s in chosen for token in range(starts[s], starts[s + 1])]

    def on_device(self, seqs: list[int]) -> TokenRows:
        """Rows of a batch of these sequences."""
        tokens, starts = self._tokens(seqs), torch.tensor([0] + [self.lengths[s][0] for s in seqs])
        rows = TokenRows(
            positions=self.rows.positions[tokens],
            q_start=starts.cumsum(0).int(),
            context_len=self.rows.context_len[seqs],
            block_table=self.rows.block_table[seqs],
            slots=self.rows.slots[tokens],
        )
        names = [field.name for field in fields(rows) if field.name != "host"]
        there = {name: getattr(rows, name).to(DEVICE) for name in names}
        return TokenRows(**there, host=rows)

    @property
    def rope_there(self) -> tuple[Tensor, Tensor]:
        return self.rope[0].to(DEVICE), self.rope[1].to(DEVICE)

    def check(self, roundings: float = 3.5) -> None:
        kv, layer, rows = self.kv, self.layer, self.rows
        theirs = self.qkv.float()
        REF.rope_store(
            theirs, rows.positions, *self.rope, layer.weights.qk_norms, layer.shape.eps,
            self.reference, kv, LAYER, rows.slots,
        )  # fmt: skip
        want = REF.attention(
            theirs.to(self.dtype), self.reference, kv, LAYER, rows.q_start, rows.context_len,
            rows.block_table, layer.shape.scale, self.window,
        )  # fmt: skip
        out, arena = self.run()
        # Weights are rounded before they meet the values, queries and keys after they were rotated;
        # the interpreter cuts bfloat16 off there.
        if self.dtype is torch.bfloat16 and DEVICE.type == "cpu":
            roundings *= 2
        close(out, want, roundings=roundings, mean=1.0)
        for at in range(0, arena.numel(), kv.block_bytes):
            block = arena[at : at + kv.block_bytes].view(self.dtype)
            planes = block.view(kv.layers, 2, kv.kv_heads, BLOCK_TOKENS, kv.head_dim)
            assert planes[1 - LAYER].isnan().all(), "another layer was written"
            stored = read_block(self.reference, kv, LAYER, at)
            for ours, expected in zip(planes[LAYER], stored, strict=True):
                assert torch.equal(ours.isnan(), expected.isnan())
                there = ~ours.isnan()
                if there.any():
                    close(ours[there], expected[there], roundings=2)


def on_device(layer: Layer) -> Layer:
    norms = layer.weights.qk_norms
    if norms is None:
        return layer
    there = norms[0].to(DEVICE), norms[1].to(DEVICE)
    return replace(layer, weights=replace(layer.weights, qk_norms=there))


def layout(kv_heads: int, dim: int, dtype: str = "float16") -> KvLayout:
    return KvLayout(2, kv_heads, dim, dtype)


def rotated_apart(case: Case) -> Case:
    """The same batch after `rope_store`, with tables that turn by nothing: what attention makes of
    it are the bits of one that turns and stores by itself."""
    count = len(case.qkv)
    qkv, arena = case.qkv.repeat(2, 1).to(DEVICE), case.arena.to(DEVICE, copy=True)
    # Twice, and as if all were one sequence's: tokens that come alone are left to attention.
    rows = replace(
        case.rows,
        positions=case.rows.positions.repeat(2).to(DEVICE),
        slots=case.rows.slots.repeat(2).to(DEVICE),
        q_start=torch.tensor([0, 2 * count], dtype=torch.int32, device=DEVICE),
        context_len=torch.tensor([2 * count], dtype=torch.int32, device=DEVICE),
    )
    rope_store(qkv, on_device(case.layer), rows, case.rope_there, arena)
    apart = Case(case.lengths, case.heads, case.kv, case.dtype, case.window, seed=case.seed)
    apart.qkv, apart.arena = qkv[:count].cpu(), arena.cpu()
    apart.rope = torch.ones_like(case.rope[0]), torch.zeros_like(case.rope[1])
    return apart
