"""Each operator in plain torch, in float64: the reference that the fast ones are compared with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from c2cserve.kernels import composed
from c2cserve.kernels.apart import Apart
from c2cserve.kernels.layer import (
    BLOCK_TOKENS,
    KvLayout,
    Layer,
    LayerShape,
    LayerWeights,
    TokenRows,
)
from c2cserve.kernels.ops import AwaitedMasks, RowSampling, SampledTokens

_TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _block_views(arena: Tensor, kv: KvLayout, layer: int, block: int) -> tuple[Tensor, Tensor]:
    """Return K and V of one block's layer as views: [kv_heads, 16, D / pair, pair] and
    [kv_heads, 16 / pair, pair, D]. A pair is two values in bfloat16, else one."""
    pair = 2 if kv.dtype == "bfloat16" else 1
    data = arena[block : block + kv.block_bytes].view(_TORCH[kv.dtype])
    k, v = data.view(kv.layers, 2, kv.kv_heads, BLOCK_TOKENS * kv.head_dim)[layer]
    keys = k.view(kv.kv_heads, kv.head_dim // pair, BLOCK_TOKENS, pair)
    values = v.view(kv.kv_heads, BLOCK_TOKENS // pair, kv.head_dim, pair)
    return keys.transpose(1, 2), values.transpose(2, 3)


def read_block(arena: Tensor, kv: KvLayout, layer: int, block: int) -> tuple[Tensor, Tensor]:
    """Return copies of K and V of one block's layer, each [kv_heads, 16, D]."""
    keys, values = _block_views(arena, kv, layer, block)
    shape = (kv.kv_heads, BLOCK_TOKENS, kv.head_dim)
    return keys.reshape(shape), values.reshape(shape)


def write_token(arena: Tensor, kv: KvLayout, layer: int, slot: int, k: Tensor, v: Tensor) -> None:
    """Store a token's keys and values, [kv_heads, D] each."""
    keys, values = _block_views(arena, kv, layer, slot // BLOCK_TOKENS)
    at, pair = slot % BLOCK_TOKENS, values.shape[2]
    keys[:, at] = k.view(kv.kv_heads, -1, pair).to(keys.dtype)
    values[:, at // pair, at % pair] = v.to(values.dtype)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


class RefOps(Apart):
    """`kernels.ops.Ops` in float64. Each operator rounds its result to float32 at the end."""

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        return table[ids.long()].float()

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        y = x.double() @ w.double().T
        return (y if bias is None else y + bias.double()).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _norm(x, weight, eps).float()

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rope_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        arena: Tensor,
        kv: KvLayout,
        layer: int,
        slots: Tensor,
    ) -> None:
        dim, half = kv.head_dim, kv.head_dim // 2
        heads = qkv.view(len(qkv), -1, dim)
        rotated = heads[:, : -kv.kv_heads].double()
        if norms is not None:
            q, k = rotated[:, : -kv.kv_heads], rotated[:, -kv.kv_heads :]
            rotated = torch.cat((_norm(q, norms[0], eps), _norm(k, norms[1], eps)), 1)
        c, s = (table[positions.long()].double()[:, None] for table in (cos, sin))
        a, b = rotated[..., :half], rotated[..., half:]
        heads[:, : -kv.kv_heads] = torch.cat((a * c - b * s, b * c + a * s), -1).float()
        for token, slot in enumerate(slots.tolist()):
            k, v = heads[token, -2 * kv.kv_heads : -kv.kv_heads], heads[token, -kv.kv_heads :]
            write_token(arena, kv, layer, slot, k, v)

    def attention(
        self,
        qkv: Tensor,
        arena: Tensor,
        kv: KvLayout,
        layer: int,
        q_start: Tensor,
        context_len: Tensor,
        block_table: Tensor,
        scale: float,
        window: int,
    ) -> Tensor:
        q = qkv.view(len(qkv), -1, kv.head_dim)[:, : -2 * kv.kv_heads].double()
        out = torch.empty(q.shape)
        starts = q_start.tolist()
        for s, length in enumerate(context_len.tolist()):
            blocks = block_table[s, : -(-length // BLOCK_TOKENS)].tolist()
            there = [read_block(arena, kv, layer, block) for block in blocks]
            k, v = (torch.cat(part, 1)[:, :length].double() for part in zip(*there, strict=True))
            group = q.shape[1] // kv.kv_heads
            k, v = (part.repeat_interleave(group, 0) for part in (k, v))
            new = starts[s + 1] - starts[s]
            at = torch.arange(length - new, length)[:, None]
            keys = torch.arange(length)[None]
            hidden = (keys > at) | ((keys <= at - window) if window else torch.tensor(False))
            scores = torch.einsum("qhd,hkd->hqk", q[starts[s] : starts[s + 1]], k) * scale
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[starts[s] : starts[s + 1]] = torch.einsum("hqk,hkd->qhd", weights, v).float()
        return out.view(len(qkv), -1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.double().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).float()

    def router_logits(self, x: Tensor, router: Tensor) -> Tensor:
        return self.linear(x, router)

    def moe_route(self, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        weights, ids = logits.double().softmax(-1).sort(stable=True, dim=-1, descending=True)
        weights, ids = weights[:, :k], ids[:, :k]
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids.int(), weights.float()

    def moe_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor
    ) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(len(x)):
            for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
                gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
                out[token] += weight * (w2[expert].double() @ (gate * gate.sigmoid() * up))
        return out.float()

    def prepare(self, index: int, weights: LayerWeights, shape: LayerShape) -> Layer:
        return Layer(index, weights, shape)

    def run_layers(
        self,
        hidden: Tensor,
        layers: Sequence[Layer],
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
        wanted: Tensor | None = None,
    ) -> None:
        composed.run_layers(self, hidden, layers, rows, rope, arena)

    def run_attention(
        self,
        hidden: Tensor,
        layer: Layer,
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
    ) -> Tensor:
        return composed.run_attention(self, hidden, layer, rows, rope, arena)

    def sample(
        self, logits: Tensor, rows: Sequence[RowSampling], awaited: AwaitedMasks | None = None
    ) -> SampledTokens:
        """Return the likeliest tokens. Random sampling has no reference here: tests compare it with
        exact distributions."""
        assert awaited is None, "masks are waited for before rows are sampled on the host"
        scores = logits.double().log_softmax(-1)
        ids = scores.argmax(-1)
        chosen = scores.gather(1, ids[:, None])[:, 0]
        top = [
            [(int(i), float(v)) for v, i in zip(*row.topk(max(0, p.top_logprobs)), strict=True)]
            for row, p in zip(scores, rows, strict=True)
        ]
        return SampledTokens(ids.tolist(), chosen.tolist(), top)

    def chains(self, row: RowSampling) -> bool:
        return False

    def chained(self, ids: Tensor, sampled: Tensor) -> Tensor:
        tokens = [int(sampled[-1 - one]) if one < 0 else one for one in ids.tolist()]
        return torch.tensor(tokens, dtype=torch.int32)
