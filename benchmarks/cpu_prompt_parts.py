"""Where the time of a prompt goes on a CPU: the operators of a layer one by one, and whole layers.

python benchmarks/cpu_prompt_parts.py [--models 0.5B,1.5B] [--tokens 128,512,2048] [--threads N]
                                      [--copies] [--scaling 1,2,4,8,16] [--level amx]
                                      [--rounds 5] [--out FILE]

A prompt's rows go through some layers of a model, with weights of their own and in bf16. Operators
are timed one after another (`composed.run_layers`), and the same layers in one native call
(`layers`). Medians over rounds; `share` is an operator's part of the sum of all. Single operators
write to memory that is new each time, the native call does not. There, the level `amx` also
writes the product of gate and up as the next product reads it. With `--copies`, the same layers
take turns with copies of all weights (`layers/chunks`), for the level `amx`.

--scaling times the native call with each number of threads, and as many single threads that have a
prompt each (`apart`): what the machine's cores can do at once. Cores that share units, power or
memory do less together than one of them times their number.

    of_linear   the rate of N threads over N times that of a single one
    of_apart    the rate of N threads over that of N single ones
"""

import argparse
import os
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_models import config_of
from report import report
from torch import Tensor

from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.layer import (
    BLOCK_TOKENS,
    KvLayout,
    Layer,
    LayerShape,
    LayerWeights,
    Mlp,
    TokenRows,
)
from c2cserve.kernels.native import chosen_isa

MODELS = {"0.5B": "qwen2.5-0.5b", "1.5B": "qwen2.5-1.5b"}
LAYERS = 4
"""That are timed: their weights exceed a core's caches."""


def matrix(outputs: int, inputs: int) -> Tensor:
    return (torch.randn(outputs, inputs) / inputs**0.5).bfloat16()


class Prompt:
    """Layers of a model, and the rows of one prompt."""

    def __init__(self, ops: CpuOps, model: str, tokens: int) -> None:
        config = config_of(MODELS[model])
        hidden, inner, heads = config.hidden, config.intermediate, config.heads
        kv_heads, size = config.kv_heads, config.head_dim
        self.ops, self.layer_count = ops, config.layers
        kv = KvLayout(LAYERS, kv_heads, size, "bfloat16")
        shape = LayerShape(kv, hidden, heads, 1e-6, size**-0.5)
        wide = (heads + 2 * kv_heads) * size
        self.layers: list[Layer] = [
            ops.prepare(index, LayerWeights(
                torch.ones(hidden), matrix(wide, hidden), torch.zeros(wide), None,
                matrix(hidden, heads * size), None, torch.ones(hidden),
                Mlp(matrix(2 * inner, hidden), None, matrix(hidden, inner), None), 0,
            ), shape)
            for index in range(LAYERS)
        ]  # fmt: skip
        blocks = -(-tokens // BLOCK_TOKENS)
        self.arena = torch.zeros(blocks * kv.block_bytes, dtype=torch.uint8)
        starts = torch.arange(blocks) * kv.block_bytes
        at = torch.arange(tokens)
        self.rows = TokenRows(
            at.int(), torch.tensor([0, tokens], dtype=torch.int32),
            torch.tensor([tokens], dtype=torch.int32), starts[None],
            starts[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS,
        )  # fmt: skip
        angles = at[:, None] / 1e4 ** (torch.arange(size // 2) / (size // 2))
        self.rope = angles.cos().contiguous(), angles.sin().contiguous()
        self.hidden = torch.randn(tokens, hidden)

    def whole_s(self) -> float:
        hidden, began_s = self.hidden.clone(), time.perf_counter()
        self.ops.run_layers(hidden, self.layers, self.rows, self.rope, self.arena)
        return (time.perf_counter() - began_s) / LAYERS

    def parts_s(self) -> dict[str, float]:
        """Return the seconds of each operator in one layer."""
        spent: dict[str, float] = {}
        hidden, ops, rows = self.hidden.clone(), self.ops, self.rows
        timed = _timer(spent)
        for layer in self.layers:
            weights, shape = layer.weights, layer.shape
            assert isinstance(weights.mlp, Mlp)
            with timed("norm"):
                x = ops.rms_norm(hidden, weights.input_norm, shape.eps)
            with timed("qkv"):
                qkv = ops.linear(x, weights.qkv, weights.qkv_bias)
            with timed("rope"):
                ops.rope_store(
                    qkv, rows.positions, *self.rope, None, shape.eps, self.arena, shape.kv,
                    layer.index, rows.slots,
                )  # fmt: skip
            with timed("attention"):
                out = ops.attention(
                    qkv, self.arena, shape.kv, layer.index, rows.q_start, rows.context_len,
                    rows.block_table, shape.scale, 0,
                )  # fmt: skip
            with timed("o"):
                branch = ops.linear(out, weights.o, None)
            with timed("norm"):
                x = ops.add_rms_norm(branch, hidden, weights.post_norm, shape.eps)
            with timed("gated"):
                act = ops.gated(x, weights.mlp.gate_up, None)
            with timed("down"):
                branch = ops.linear(act, weights.mlp.down, None)
            hidden += branch
        return {name: seconds / LAYERS for name, seconds in spent.items()}


def scaling(
    level: str, model: str, tokens: int, counts: list[int], rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each number of threads, by turns."""
    cpus = sorted(os.sched_getaffinity(0))
    together = {
        count: Prompt(CpuOps(count, cpus[:count] if count > 1 else None, level), model, tokens)
        for count in counts
    }
    singles = [Prompt(CpuOps(1, None, level), model, tokens) for _ in range(max(counts))]
    rates: dict[tuple[str, int], list[float]] = {}
    with ThreadPoolExecutor(max(counts)) as executor:
        for turn in range(rounds + 1):
            for count, prompt in together.items():
                began_s = time.perf_counter()
                list(executor.map(Prompt.whole_s, singles[:count]))
                apart_s = (time.perf_counter() - began_s) / LAYERS
                if turn > 0:
                    rates.setdefault(("apart", count), []).append(count / apart_s)
                    rates.setdefault(("threads", count), []).append(1 / prompt.whole_s())
    one = median(rates["apart", min(counts)]) / min(counts)
    found: list[dict[str, Any]] = []
    for count, prompt in together.items():
        rate, apart = median(rates["threads", count]), median(rates["apart", count])
        found.append({
            "model": model, "tokens": tokens, "threads": count,
            "tokens_per_s": rate * tokens / prompt.layer_count,
            "of_linear": rate / (count * one), "of_apart": rate / apart,
        })  # fmt: skip
    return found


def _timer(spent: dict[str, float]) -> Callable[[str], Any]:
    @contextmanager
    def timed(name: str) -> Generator[None]:
        began_s = time.perf_counter()
        yield
        spent[name] = spent.get(name, 0.0) + time.perf_counter() - began_s

    return timed


def measure(
    ops: CpuOps, model: str, tokens: int, rounds: int, *, copies: bool
) -> list[dict[str, Any]]:
    prompt = Prompt(ops, model, tokens)
    prompt.whole_s()
    whole, parts = list[float](), dict[str, list[float]]()
    copied = list[float]()
    for _ in range(rounds):
        if copies:
            ops.copy_strips(always=True)
            copied.append(prompt.whole_s())
            ops.copy_strips(always=False)
        whole.append(prompt.whole_s())
        for name, seconds in prompt.parts_s().items():
            parts.setdefault(name, []).append(seconds)
    total = sum(map(median, parts.values()))
    layer_s = median(whole)
    row = {"model": model, "tokens": tokens}
    found: list[dict[str, Any]] = [
        row | {"part": "layers", "ms": layer_s * 1e3, "share": layer_s / total,
               "tokens_per_s": tokens / (layer_s * prompt.layer_count)}
    ]  # fmt: skip
    if copies:
        parts["layers/chunks"] = copied
    return found + [
        row | {"part": name, "ms": median(times) * 1e3, "share": median(times) / total}
        for name, times in parts.items()
    ]


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="0.5B,1.5B")
    parser.add_argument("--tokens", default=[128, 512, 2048], type=numbers)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--scaling", type=numbers, help="numbers of threads")
    parser.add_argument("--level", default=chosen_isa())
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)  # it adds what the next layer begins with
    results: dict[str, list[dict[str, Any]]] = {"scaling": [], "parts": []}

    def record() -> None:
        """What a run that is ended has measured is not lost."""
        report(results, given.out, show=False, threads=given.threads, level=given.level)

    cpus = sorted(os.sched_getaffinity(0))[: given.threads]
    ops = CpuOps(given.threads, cpus if given.threads > 1 else None, given.level)
    for model in given.models.split(","):
        for tokens in given.tokens:
            if given.scaling:
                rows = scaling(given.level, model, tokens, given.scaling, given.rounds)
                results["scaling"] += rows
                for row in rows:
                    print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
                record()
                continue
            results["parts"] += (
                rows := measure(ops, model, tokens, given.rounds, copies=given.copies)
            )
            line = "  ".join(f"{one['part']} {one['ms']:.2f}" for one in rows)
            record()
            print(f"{model} {tokens}: {rows[0]['tokens_per_s']:.0f}/s  {line}", flush=True)


if __name__ == "__main__":
    main()
