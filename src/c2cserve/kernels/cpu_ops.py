"""The operators on CPU cores: a thin binding of the native kernels on torch tensors."""

import ctypes
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from c2cserve.kernels.native import DTYPE_CODES, SampleRow, best_isa, cpu_flags, load_library
from c2cserve.kernels.ops import Drawn, KvLayout, RowSampling

_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class CpuOps:
    """`kernels.ops.Ops` on a pool of `threads` threads, helpers pinned to `cpus` if given (the
    caller pins itself). Results do not depend on the number of threads. Not thread-safe."""

    def __init__(self, threads: int = 1, cpus: Sequence[int] = (), isa: str | None = None) -> None:
        if threads < 1:
            raise ValueError("threads must be at least 1")
        self.isa = isa or best_isa(cpu_flags(), os.environ.get("C2CSERVE_CPU_ISA") or None)
        self.threads = threads
        self._lib = load_library(self.isa)
        pinned = (ctypes.c_int * len(cpus))(*cpus)
        self._pool = self._lib.c2c_pool_new(threads, pinned, len(cpus))

    def __del__(self) -> None:
        pool = getattr(self, "_pool", None)
        if pool is not None:
            self._lib.c2c_pool_free(pool)
            self._pool = None

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        out = torch.empty((len(ids), table.shape[1]))
        self._lib.c2c_embed(
            out.data_ptr(), table.data_ptr(), _CODES[table.dtype], ids.data_ptr(), *out.shape
        )
        return out

    def linear(
        self, x: Tensor, w: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        m, k = x.shape
        n = w.shape[0]
        if w.shape[1] != k or w.stride(1) != 1 or x.stride(1) != 1:
            raise ValueError(f"linear: x {tuple(x.shape)} and w {tuple(w.shape)} do not fit")
        if out is None:
            out = torch.empty((m, n))
        self._lib.c2c_linear(
            self._pool, out.data_ptr(), out.stride(0), x.data_ptr(), x.stride(0),
            w.data_ptr(), w.stride(0), _CODES[w.dtype], _pointer(bias), m, n, k,
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape)
        self._lib.c2c_rms_norm(
            self._pool, out.data_ptr(), x.data_ptr(), weight.data_ptr(), eps, *x.shape
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape)
        self._lib.c2c_add_rms_norm(
            self._pool, out.data_ptr(), x.data_ptr(), residual.data_ptr(), weight.data_ptr(),
            eps, *x.shape,
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
        q_norm, k_norm = norms or (None, None)
        heads = qkv.shape[1] // kv.head_dim - 2 * kv.kv_heads
        self._lib.c2c_rope_store(
            self._pool, qkv.data_ptr(), positions.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            _pointer(q_norm), _pointer(k_norm), eps, arena.data_ptr(), DTYPE_CODES[kv.dtype], layer,
            slots.data_ptr(), qkv.shape[0], heads, kv.kv_heads, kv.head_dim,
        )  # fmt: skip

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
        heads = qkv.shape[1] // kv.head_dim - 2 * kv.kv_heads
        out = torch.empty((qkv.shape[0], heads * kv.head_dim))
        self._lib.c2c_attention(
            self._pool, out.data_ptr(), qkv.data_ptr(), qkv.shape[1], arena.data_ptr(),
            DTYPE_CODES[kv.dtype], layer, q_start.data_ptr(), context_len.data_ptr(),
            block_table.data_ptr(), block_table.shape[1], len(context_len), heads, kv.kv_heads,
            kv.head_dim, scale, window,
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, width = gate_up.shape
        out = torch.empty((tokens, width // 2))
        self._lib.c2c_silu_mul(self._pool, out.data_ptr(), gate_up.data_ptr(), tokens, width // 2)
        return out

    def moe_route(self, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        tokens, experts = logits.shape
        ids = torch.empty((tokens, k), dtype=torch.int32)
        weights = torch.empty((tokens, k))
        self._lib.c2c_moe_route(
            logits.data_ptr(), tokens, experts, k, int(renormalize), ids.data_ptr(),
            weights.data_ptr(),
        )  # fmt: skip
        return ids, weights

    def moe_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor
    ) -> Tensor:
        experts, hidden, inner = w2.shape
        out = torch.empty(x.shape)
        self._lib.c2c_moe_experts(
            self._pool, out.data_ptr(), x.data_ptr(), ids.data_ptr(), weights.data_ptr(),
            w13.data_ptr(), w2.data_ptr(), _CODES[w13.dtype], x.shape[0], ids.shape[1], experts,
            hidden, inner,
        )  # fmt: skip
        return out

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> Drawn:
        count, vocab = logits.shape
        if len(rows) != count:
            raise ValueError(f"sample: {count} rows of logits, parameters for {len(rows)}")
        wanted = min(vocab, max((row.top_logprobs for row in rows), default=0))
        stride = max(1, wanted)
        native = (SampleRow * count)()
        for i, row in enumerate(rows):
            _fill(native[i], logits.data_ptr() + i * vocab * 4, row, vocab)
        ids = (ctypes.c_int32 * count)()
        logprobs = (ctypes.c_float * count)()
        top_ids = (ctypes.c_int32 * (count * stride))()
        top_values = (ctypes.c_float * (count * stride))()
        self._lib.c2c_sample(
            self._pool, native, count, vocab, ids, logprobs, top_ids, top_values, stride
        )
        top = [
            list(zip(top_ids[i * stride : i * stride + k], top_values[i * stride : i * stride + k],
                     strict=True))
            for i, row in enumerate(rows)
            for k in (max(0, min(vocab, row.top_logprobs)),)
        ] if wanted > 0 else []  # fmt: skip
        return Drawn(list(ids), list(logprobs), top)


def _fill(native: SampleRow, logits: int, row: RowSampling, vocab: int) -> None:
    """Tensors of `row` must outlive the call that uses `native`."""
    native.logits = logits
    native.seed = row.seed
    native.position = row.position
    native.temperature = row.temperature
    native.top_p = row.top_p
    native.top_k = row.top_k
    native.min_p = row.min_p
    native.repetition = row.repetition
    native.presence = row.presence
    native.frequency = row.frequency
    native.top_logprobs = min(vocab, row.top_logprobs)
    for name in ("prompt", "output", "bias", "banned"):
        tensor: Tensor | None = getattr(row, name)
        if tensor is not None and len(tensor):
            setattr(native, name, tensor.data_ptr())
            setattr(native, f"{name}_len", len(tensor))
    native.bias_ids = _pointer(row.bias_ids)
