"""The operators on CPU cores: a thin binding of the native kernels on torch tensors.

Shapes, dtypes and contiguity are checked here. Indices (token ids, positions, slots, block tables,
experts) are checked in the kernels. Both raise `ValueError` before anything is written.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from c2cserve.kernels.apart import Apart
from c2cserve.kernels.layer import KvLayout, Layer, LayerShape, LayerWeights, TokenRows
from c2cserve.kernels.layer_records import (
    DTYPES,
    HEAD_DIM_MAX,
    native_layer,
    records_of,
    refusal,
    step_record,
)
from c2cserve.kernels.native import DTYPE_CODES, chosen_isa, load_library
from c2cserve.kernels.ops import AwaitedMasks, RowSampling, SampledTokens
from c2cserve.kernels.refusals import misfit, misplaced_sequence, misplaced_token
from c2cserve.kernels.sample_rows import pack_rows, unpack_tokens

_THREADS_MAX = 1024


def _dense(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype is dtype and tensor.is_contiguous()


class CpuOps(Apart):
    """`kernels.ops.Ops` on a pool of `threads` threads: the calling thread and helpers.

    With `cpus`, helpers are pinned to all but the first. A caller that the system has woken on a
    helper's CPU moves to the first, if it is allowed there. Results do not depend on the
    number of threads. Not thread-safe.
    """

    def __init__(
        self, threads: int = 1, cpus: Sequence[int] | None = None, isa: str | None = None
    ) -> None:
        if not 1 <= threads <= _THREADS_MAX:
            raise ValueError(f"threads must be 1 to {_THREADS_MAX}, not {threads}")
        self.isa = isa or chosen_isa()
        self.threads = threads
        self._lib = load_library(self.isa)
        cpus = cpus or ()
        pinned = (ctypes.c_int * len(cpus))(*cpus)
        self._pool = self._lib.c2c_pool_new(threads, pinned, len(cpus))

    def __del__(self) -> None:
        pool = getattr(self, "_pool", None)
        if pool is not None:
            self._lib.c2c_pool_free(pool)
            self._pool = None

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        vocab, hidden = table.shape
        (tokens,) = ids.shape
        if not table.is_contiguous() or not _dense(ids, torch.int32):
            raise misfit("embed", table=table, ids=ids)
        out = torch.empty((tokens, hidden))
        bad = self._lib.c2c_embed(
            self._pool, out.data_ptr(), table.data_ptr(), DTYPES[table.dtype], vocab,
            ids.data_ptr(), tokens, hidden,
        )  # fmt: skip
        if bad >= 0:
            raise ValueError(f"embed: id {int(ids[bad])} at {bad} is not in [0, {vocab})")
        return out

    def linear(
        self, x: Tensor, w: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        m, k = x.shape
        n, width = w.shape
        if (
            width != k or k == 0 or w.stride(1) != 1 or x.stride(1) != 1
            or x.dtype is not torch.float32
            or (bias is not None and (bias.shape[0] != n or not bias.is_contiguous()))
        ):  # fmt: skip
            raise misfit("linear", x=x, w=w, bias=bias)
        if out is None:
            out = torch.empty((m, n))
        elif out.shape != (m, n) or out.dtype is not torch.float32 or out.stride(1) != 1:
            raise misfit("linear", x=x, w=w, out=out)
        self._lib.c2c_linear(
            self._pool, out.data_ptr(), out.stride(0), x.data_ptr(), x.stride(0),
            w.data_ptr(), w.stride(0), DTYPES[w.dtype],
            None if bias is None else bias.data_ptr(), 0 if bias is None else DTYPES[bias.dtype],
            m, n, k,
        )  # fmt: skip
        return out

    def gated(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        (m, k), (n, width) = x.shape, w.shape
        if (
            width != k or k == 0 or n % 2
            or not w.is_contiguous() or not _dense(x, torch.float32)
            or (bias is not None and (bias.shape != (n,) or not bias.is_contiguous()))
        ):  # fmt: skip
            raise misfit("gated", x=x, w=w, bias=bias)
        out = torch.empty((m, n // 2))
        self._lib.c2c_gated(
            self._pool, out.data_ptr(), x.data_ptr(), w.data_ptr(), DTYPES[w.dtype],
            None if bias is None else bias.data_ptr(), 0 if bias is None else DTYPES[bias.dtype],
            m, n // 2, k,
        )  # fmt: skip
        return out

    def router_logits(self, x: Tensor, router: Tensor) -> Tensor:
        (tokens, hidden), (experts, width) = x.shape, router.shape
        if width != hidden or not _dense(x, torch.float32) or not router.is_contiguous():
            raise misfit("router_logits", x=x, router=router)
        out = torch.empty((tokens, experts))
        self._lib.c2c_router_logits(
            self._pool, out.data_ptr(), x.data_ptr(), router.data_ptr(), DTYPES[router.dtype],
            tokens, experts, hidden,
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        tokens, hidden = x.shape
        if not _dense(x, torch.float32) or not _dense(weight, torch.float32) \
                or weight.shape[0] != hidden:  # fmt: skip
            raise misfit("rms_norm", x=x, weight=weight)
        out = torch.empty((tokens, hidden))
        self._lib.c2c_rms_norm(
            self._pool, out.data_ptr(), x.data_ptr(), weight.data_ptr(), eps, tokens, hidden
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        tokens, hidden = x.shape
        if (
            not _dense(x, torch.float32) or not _dense(residual, torch.float32)
            or not _dense(weight, torch.float32)
            or residual.shape != x.shape or len(weight) != hidden
        ):  # fmt: skip
            raise misfit("add_rms_norm", x=x, residual=residual, weight=weight)
        out = torch.empty((tokens, hidden))
        self._lib.c2c_add_rms_norm(
            self._pool, out.data_ptr(), x.data_ptr(), residual.data_ptr(), weight.data_ptr(),
            eps, tokens, hidden,
        )  # fmt: skip
        return out

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
        heads = _query_heads("rope_store", qkv, kv, layer)
        tokens, table = qkv.shape[0], cos.shape[0]
        if (
            not _dense(qkv, torch.float32) or kv.head_dim % 2
            or not _dense(positions, torch.int32) or len(positions) != tokens
            or not _dense(slots, torch.int64) or len(slots) != tokens
            or not _dense(cos, torch.float32) or not _dense(sin, torch.float32)
            or cos.shape != sin.shape or cos.shape[1] * 2 != kv.head_dim
        ):  # fmt: skip
            raise misfit("rope_store", qkv=qkv, positions=positions, cos=cos, sin=sin, slots=slots)
        q_norm, k_norm = None, None
        if norms is not None:
            if not all(_dense(w, torch.float32) and len(w) == kv.head_dim for w in norms):
                raise misfit("rope_store", q_norm=norms[0], k_norm=norms[1])
            q_norm, k_norm = norms[0].data_ptr(), norms[1].data_ptr()
        bad = self._lib.c2c_rope_store(
            self._pool, qkv.data_ptr(), positions.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            table, q_norm, k_norm, eps, arena.data_ptr(), arena.nbytes, DTYPE_CODES[kv.dtype],
            kv.layers, layer, slots.data_ptr(), tokens, heads, kv.kv_heads, kv.head_dim,
        )  # fmt: skip
        if bad >= 0:
            raise misplaced_token("rope_store", bad, positions, table, slots, arena)

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
        heads = _query_heads("attention", qkv, kv, layer)
        seqs = len(context_len)
        if (
            qkv.dtype is not torch.float32 or qkv.stride(1) != 1
            or not _dense(q_start, torch.int32) or len(q_start) != seqs + 1
            or not _dense(context_len, torch.int32)
            or not _dense(block_table, torch.int64) or block_table.shape[0] != seqs
        ):  # fmt: skip
            raise misfit("attention", qkv=qkv, q_start=q_start, context_len=context_len,
                          block_table=block_table)  # fmt: skip
        out = torch.empty((qkv.shape[0], heads * kv.head_dim))
        bad = self._lib.c2c_attention(
            self._pool, out.data_ptr(), qkv.data_ptr(), qkv.stride(0), arena.data_ptr(),
            arena.nbytes, DTYPE_CODES[kv.dtype], kv.layers, layer, q_start.data_ptr(),
            context_len.data_ptr(), block_table.data_ptr(), block_table.shape[1], seqs,
            qkv.shape[0], heads, kv.kv_heads, kv.head_dim, scale, window,
        )  # fmt: skip
        if bad >= 0:
            raise misplaced_sequence("attention", bad, context_len, len(qkv), arena)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, width = gate_up.shape
        if not _dense(gate_up, torch.float32) or width % 2:
            raise misfit("silu_mul", gate_up=gate_up)
        out = torch.empty((tokens, width // 2))
        self._lib.c2c_silu_mul(self._pool, out.data_ptr(), gate_up.data_ptr(), tokens, width // 2)
        return out

    def moe_route(self, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        tokens, experts = logits.shape
        if not _dense(logits, torch.float32) or not 1 <= k <= experts:
            raise misfit(f"moe_route of {k}", logits=logits)
        ids = torch.empty((tokens, k), dtype=torch.int32)
        weights = torch.empty((tokens, k))
        self._lib.c2c_moe_route(
            self._pool, logits.data_ptr(), tokens, experts, k, int(renormalize), ids.data_ptr(),
            weights.data_ptr(),
        )  # fmt: skip
        return ids, weights

    def moe_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor
    ) -> Tensor:
        experts, hidden, inner = w2.shape
        tokens, k = ids.shape
        if (
            not _dense(x, torch.float32) or x.shape != (tokens, hidden)
            or not _dense(ids, torch.int32)
            or not _dense(weights, torch.float32) or weights.shape != ids.shape
            or w13.shape != (experts, 2 * inner, hidden) or w13.dtype is not w2.dtype
            or not w13.is_contiguous() or not w2.is_contiguous()
        ):  # fmt: skip
            raise misfit("moe_experts", x=x, ids=ids, weights=weights, w13=w13, w2=w2)
        out = torch.empty((tokens, hidden))
        bad = self._lib.c2c_moe_experts(
            self._pool, out.data_ptr(), x.data_ptr(), ids.data_ptr(), weights.data_ptr(),
            w13.data_ptr(), w2.data_ptr(), DTYPES[w13.dtype], tokens, k, experts, hidden, inner,
        )  # fmt: skip
        if bad >= 0:
            raise ValueError(
                f"moe_experts: choice {bad % k} of token {bad // k} is "
                f"{int(ids.flatten()[bad])}: no expert of {experts}, or chosen twice"
            )
        return out

    # ---- whole layers ---------------------------------------------------------------------------

    def prepare(self, index: int, weights: LayerWeights, shape: LayerShape) -> Layer:
        return native_layer(index, weights, shape)

    def run_layers(
        self,
        hidden: Tensor,
        layers: Sequence[Layer],
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
        wanted: Tensor | None = None,
    ) -> None:
        step = step_record(hidden, layers[0].shape, rows, rope, arena, wanted)
        where = ctypes.c_int64()
        fault = self._lib.c2c_layers(
            self._pool, records_of(layers), len(layers), step, ctypes.byref(where)
        )
        if fault:
            raise refusal(fault, where.value, layers[0], rows, rope, arena)

    def run_attention(
        self,
        hidden: Tensor,
        layer: Layer,
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
    ) -> Tensor:
        step = step_record(hidden, layer.shape, rows, rope, arena)
        out = torch.empty(hidden.shape)
        where = ctypes.c_int64()
        fault = self._lib.c2c_attend(
            self._pool, records_of([layer]), step, out.data_ptr(), ctypes.byref(where)
        )
        if fault:
            raise refusal(fault, where.value, layer, rows, rope, arena)
        return out

    def sample(
        self, logits: Tensor, rows: Sequence[RowSampling], awaited: AwaitedMasks | None = None
    ) -> SampledTokens:
        assert awaited is None, "masks are waited for before rows are sampled on the host"
        count, vocab = logits.shape
        if len(rows) != count or not _dense(logits, torch.float32):
            raise misfit(f"sample for {len(rows)} rows", logits=logits)
        native = pack_rows(logits, rows)
        stride = max(1, *(min(vocab, row.top_logprobs) for row in rows)) if rows else 1
        ids = (ctypes.c_int32 * count)()
        logprobs = (ctypes.c_float * count)()
        top_ids = (ctypes.c_int32 * (count * stride))()
        top_values = (ctypes.c_float * (count * stride))()
        bad = self._lib.c2c_sample(
            self._pool, native, count, vocab, ids, logprobs, top_ids, top_values, stride
        )
        if bad >= 0:
            raise ValueError(f"sample: row {bad} names token ids that are not in [0, {vocab})")
        return unpack_tokens(rows, vocab, stride, ids, logprobs, top_ids, top_values)

    def chains(self, row: RowSampling) -> bool:
        """Return False: tokens are known before the next step can begin."""
        return False

    def chained(self, ids: Tensor, sampled: Tensor) -> Tensor:
        rows = (-1 - ids).clamp_(min=0)
        return torch.where(ids < 0, sampled.index_select(0, rows), ids)

    # ---- for benchmarks: traces, ways of `linear`, and ceilings ---------------------------------

    def traced(self, run: Callable[[], object], calls: int) -> Tensor:
        """Return when threads worked at the first `calls` calls that `run` shares out.

        [calls, 3 + 2 threads] in int64, times in nanoseconds. A row has a call's number of parts,
        its begin and end, and each thread's begin and end. Those of a thread that took none are
        zeros."""
        self._lib.c2c_trace_begin(self._pool, calls)
        try:
            run()
        finally:
            count = self._lib.c2c_trace_count(self._pool)
            rows = torch.empty((count, 3 + 2 * self.threads), dtype=torch.int64)
            self._lib.c2c_trace_end(self._pool, rows.data_ptr())
        return rows

    def copy_strips(self, *, always: bool) -> None:
        """Multiply more than 32 rows with copies of weights in bfloat16, also where tiles can read
        them in place. The bits are the same. Only for `amx`."""
        self._lib.c2c_copy_strips(self._pool, int(always))

    def tile_steps(self, w_bytes: int, x_bytes: int, steps: int) -> float:
        """Multiply tiles that are read round and round from so many bytes of each operand. Return
        the number of operations done. Only for `amx`."""
        step_bytes = 2048
        if min(w_bytes, x_bytes) < step_bytes or w_bytes % step_bytes or x_bytes % step_bytes:
            raise ValueError(f"tile_steps: {w_bytes} and {x_bytes} are not whole steps")
        return self._lib.c2c_tile_steps(self._pool, w_bytes, x_bytes, steps)

    def read(self, data: Tensor) -> None:
        """Read all of a float32 tensor, as fast as these threads can."""
        if not _dense(data, torch.float32):
            raise misfit("read", data=data)
        self._lib.c2c_read(self._pool, data.data_ptr(), data.numel())

    def multiply(self, rounds: int) -> float:
        """Keep these threads' multiply-add units full. Return the number of operations done."""
        return self._lib.c2c_multiply(self._pool, rounds)


def _query_heads(op: str, qkv: Tensor, kv: KvLayout, layer: int) -> int:
    """Return the number of query heads in a row of qkv. Raises `ValueError` if `kv` does not
    describe such rows."""
    heads, rest = divmod(qkv.shape[1], kv.head_dim)
    heads -= 2 * kv.kv_heads
    if (
        rest or heads < 1 or heads % kv.kv_heads or kv.head_dim > HEAD_DIM_MAX
        or not 0 <= layer < kv.layers
    ):  # fmt: skip
        raise ValueError(f"{op}: rows of {qkv.shape[1]} at layer {layer} do not fit {kv}")
    return heads
