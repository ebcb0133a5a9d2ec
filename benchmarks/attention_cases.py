"""What `attention.py` measures: batches, what they read and compute at least, and a layer's keys
and values in an arena as pages of equal distance, as other kernels want them. No GPU in here."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from c2cserve.kernels.gpu.attention.flash_pages import paged
from c2cserve.kernels.layer import BLOCK_TOKENS, KvLayout, TokenRows

ITEM_BYTES = 2


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences by their new tokens and their tokens in all; those with one new token come last."""

    name: str
    new: tuple[int, ...]
    context: tuple[int, ...]

    @property
    def decodes(self) -> int:
        """Sequences of one new token."""
        return sum(count == 1 for count in self.new)

    @property
    def tokens(self) -> int:
        return sum(self.new)

    @property
    def blocks(self) -> int:
        return sum(-(-length // BLOCK_TOKENS) for length in self.context)


def decode(batch: int, context: int) -> Case:
    return Case(f"decode {batch} x {context}", (1,) * batch, (context,) * batch)


def prefill(new: int, prefix: int = 0) -> Case:
    return Case(f"prefill {new} after {prefix}", (new,), (prefix + new,))


CASES = (
    *(decode(batch, context) for batch in (1, 8, 32) for context in (512, 2048, 8192)),
    prefill(512), prefill(2048), prefill(8192), prefill(2048, 6144),
    Case("mixed: 2048 after 0, 1024 after 3072, 30 x 2048", (2048, 1024) + (1,) * 30,
         (2048, 4096) + (2048,) * 30),
)  # fmt: skip


# ---- floors --------------------------------------------------------------------------------------


def kv_bytes(case: Case, kv: KvLayout) -> int:
    """Keys and values of one layer that a batch must read, each once, new ones included."""
    return sum(case.context) * 2 * kv.kv_heads * kv.head_dim * ITEM_BYTES


def flops(case: Case, heads: int, head_dim: int) -> float:
    """Of both products of one layer, each token's with the tokens up to itself."""
    pairs = sum(
        new * (length - new) + new * (new + 1) // 2
        for new, length in zip(case.new, case.context, strict=True)
    )
    return 4.0 * heads * head_dim * pairs


def floor(
    case: Case, kv: KvLayout, heads: int, hbm_bytes_per_s: float, matmul_flops: float
) -> tuple[float, str]:
    """Seconds of one layer that nothing can beat, and what sets them: "memory" or "matrix"."""
    memory_s = kv_bytes(case, kv) / hbm_bytes_per_s
    matrix_s = flops(case, heads, kv.head_dim) / matmul_flops
    return (memory_s, "memory") if memory_s >= matrix_s else (matrix_s, "matrix")


# ---- where keys and values are -------------------------------------------------------------------


def block_offsets(count: int, block_bytes: int, span_bytes: int, seed: int = 0) -> list[int]:
    """Bytes from the arena's begin: blocks of one model in spans that other models' spans may lie
    between, as the policy gives them out, in no order."""
    per_span = span_bytes // block_bytes
    if not per_span:
        raise ValueError(f"a span of {span_bytes} bytes has no room for {block_bytes}")
    places = [
        i // per_span * span_bytes + i % per_span * block_bytes
        for i in range(-(-count // per_span) * per_span)
    ]
    return random.Random(seed).sample(places, count)


def arena_bytes(count: int, block_bytes: int, span_bytes: int) -> int:
    """For so many blocks of `block_offsets`."""
    return -(-count // (span_bytes // block_bytes)) * span_bytes


def page_unit(block_bytes: int, span_bytes: int) -> int:
    """Bytes, the largest of which all of a model's block offsets are multiples. Pages that far
    apart overlap where it is less than a block; those in use do not."""
    return math.gcd(block_bytes, span_bytes)


def kv_pages(arena: Tensor, kv: KvLayout, layer: int, unit: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer, each [pages, kv_heads, 16, head_dim], of equal strides: page p is
    the block at byte p * unit. `arena` is uint8; K is not transposed in a block."""
    if unit % ITEM_BYTES or kv.block_bytes % unit:
        raise ValueError(f"pages {unit} bytes apart do not meet blocks of {kv.block_bytes}")
    return paged(arena.view(torch.bfloat16), kv, layer, unit)


@dataclass(frozen=True, slots=True)
class Pages:
    """A batch's tables as arrays of page numbers, on the host; int32."""

    q_start: Tensor
    """[S + 1]"""
    starts: Tensor
    """[S + 1]: where a sequence's pages begin in `numbers`."""
    numbers: Tensor
    last_tokens: Tensor
    """[S]: tokens in the last page."""


def pages_of(rows: TokenRows, unit: int) -> Pages:
    """Raises ValueError where a block does not begin at a multiple of `unit` or 32 bits do not
    tell where."""
    context = rows.context_len.cpu().long()
    counts = (context + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    table = rows.block_table.cpu()
    offsets = torch.cat([row[: int(n)] for row, n in zip(table, counts, strict=True)])
    if bool((offsets % unit).any()) or int(offsets.max()) // unit >= 2**31:
        raise ValueError(f"blocks cannot be numbered by {unit} bytes")
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    last = context - (counts - 1) * BLOCK_TOKENS
    return Pages(rows.q_start.cpu(), starts, (offsets // unit).int(), last.int())


def token_rows(case: Case, offsets: Sequence[int]) -> TokenRows:
    """A batch whose sequences take blocks from `offsets` in order; on the host."""
    width = max(-(-length // BLOCK_TOKENS) for length in case.context)
    table = torch.zeros(len(case.new), width, dtype=torch.int64)
    places: list[Tensor] = []
    slots: list[Tensor] = []
    used = 0
    for s, (new, length) in enumerate(zip(case.new, case.context, strict=True)):
        count = -(-length // BLOCK_TOKENS)
        table[s, :count] = torch.tensor(offsets[used : used + count])
        used += count
        at = torch.arange(length - new, length)
        places.append(at)
        slots.append(table[s, at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS)
    return TokenRows(
        torch.cat(places).int(), torch.tensor((0, *case.new)).cumsum(0).int(),
        torch.tensor(case.context).int(), table, torch.cat(slots),
    )  # fmt: skip


# ---- what is right -------------------------------------------------------------------------------


def watched_tokens(case: Case) -> list[tuple[int, int, int]]:
    """Some of a batch's tokens, (row, sequence, tokens it sees): each sequence's last one of the
    first three and the last sequence, and of the first sequence the first and a middle one."""
    chosen: list[tuple[int, int, int]] = []
    starts = [sum(case.new[:s]) for s in range(len(case.new))]
    for s in sorted({*range(min(3, len(case.new))), len(case.new) - 1}):
        of_one = {case.new[s] - 1} | ({0, case.new[s] // 2} if s == 0 else set())
        before = case.context[s] - case.new[s]
        chosen += [(starts[s] + i, s, before + i + 1) for i in sorted(of_one)]
    return chosen


def reference(
    q: Tensor, keys: Tensor, values: Tensor, numbers: Tensor, seen: int, scale: float
) -> Tensor:
    """One token in float32: q [heads, dim], its sequence's page `numbers` -> [heads, dim]."""
    heads, dim = q.shape
    kv_heads = keys.shape[1]

    def tokens(pages: Tensor) -> Tensor:
        mine = pages[numbers.long().to(pages.device)]
        return mine.transpose(0, 1).reshape(kv_heads, -1, dim)[:, :seen].double()

    grouped = q.double().view(kv_heads, heads // kv_heads, dim)
    weights = (grouped @ tokens(keys).mT * scale).softmax(-1)
    return (weights @ tokens(values)).view(heads, dim).float()


def unit_heads(count: int, head_dim: int, device: torch.device, seed: int) -> Tensor:
    """[count, head_dim] bfloat16, random, of mean square 1: a norm of heads leaves their bits."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.randn(count, head_dim, generator=generator, device=device)
    return (drawn * drawn.square().mean(-1, keepdim=True).rsqrt()).bfloat16()


def error(out: Tensor, right: Tensor) -> float:
    """The largest difference; NaN counts as endless."""
    worst = (out.float() - right.float()).abs().max().item()
    return math.inf if math.isnan(worst) else worst


# ---- a table -------------------------------------------------------------------------------------

_COLUMNS = (
    "case", "floor us", "by", "ours, rope + store in it", "ours, attention only",
    "FlashInfer, attention only", "by", "ours / FlashInfer", "plan us, host", "copies to the GPU",
)  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, a line for every row of `attention_run.measure_case`; microseconds of one layer."""
    lines = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    for row in rows:
        ours, peer = row["ours"], best(row["peers"])
        cells = [row["case"], _us(row["floor_s"]), row["bound"], _us(ours["seconds"]),
                 _us(ours.get("attention_s"))]  # fmt: skip
        if peer is None:
            cells += ["-"] * 5
        else:
            name, took = peer
            copied = took.get("plan_copies")
            cells += [
                _us(took["seconds"]), name, f"{ours['seconds'] / took['seconds']:.2f}",
                _us(took["plan_s"]),
                "-" if copied is None else f"{copied['count']}, {copied['bytes']} bytes",
            ]  # fmt: skip
        lines.append(_line(cells))
    return "\n".join(lines)


def best(peers: dict[str, dict[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """The fastest of those that ran."""
    ran = [(name, one) for name, one in peers.items() if "seconds" in one]
    return min(ran, key=lambda one: one[1]["seconds"], default=None)


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
