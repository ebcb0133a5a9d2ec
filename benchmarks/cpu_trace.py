"""Where threads wait in a model's layers on a CPU: the calls of the thread pool one by one. JSON.

python benchmarks/cpu_trace.py [--model 0.5B] [--level amx] [--threads 16] [--prompts 128,512]
                               [--decodes 1,8] [--context 256] [--steps 20] [--out FILE]

A layer shares out its work in some calls, with a wait after each: norms, qkv, rotary embedding,
attention and so on, in the order of `decoder.h`. What is soon done is not shared out, and belongs
to `alone_us` of the next call. Times are in microseconds, and medians over steps and layers but the
last, which may compute fewer rows.

    parts               of a call; `threads` is how many threads took one
    alone_us            from the end of the call before to the begin of this one
    whole_us            from begin to end
    first_end_us, mean_end_us, last_end_us
                        when threads ended their last parts. From `mean` to `last` half of them wait
    busy                the share of the whole that threads have spent in parts
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from cpu_builds import Step, Weights, loaded
from cpu_prompt_parts import MODELS, numbers
from report import report
from torch import Tensor

from c2cserve.kernels import native
from c2cserve.kernels.cpu_ops import CpuOps

_CALLS_MOST = 4096  # of a step


def per_call(steps: Tensor, layers: int) -> list[dict[str, Any]]:
    """Return a row for each call of a layer, out of steps' traces [steps, calls, 3 + 2 threads]."""
    count = -(-steps.shape[1] // layers)  # of a layer: the last one may have fewer
    last_end = torch.cat([steps[:, :1, 1], steps[:, :-1, 2]], 1)
    rows: list[dict[str, Any]] = []
    for call in range(count):
        at = range(count + call, count * (layers - 1), count) or range(call, steps.shape[1], count)
        mine = steps[:, list(at)]
        begin, whole = mine[..., 1], mine[..., 2] - mine[..., 1]
        began, ended = mine[..., 3::2], mine[..., 4::2]
        took = ended > 0
        ends = (ended - begin[..., None]).double().masked_fill(~took, torch.nan)
        busy = (ended - began).sum(-1) / (whole * took.shape[-1])
        us = {
            "alone_us": begin - last_end[:, list(at)], "whole_us": whole,
            "first_end_us": ends.nan_to_num(torch.inf).amin(-1), "mean_end_us": ends.nanmean(-1),
            "last_end_us": ends.nan_to_num(0.0).amax(-1),
        }  # fmt: skip
        rows.append({
            "call": call, "parts": int(mine[..., 0].median()),
            "threads": int(took.sum(-1).median()),
            **{name: round(float(value.double().median()) / 1e3, 1) for name, value in us.items()},
            "busy": round(float(busy.mean()), 2),
        })  # fmt: skip
    return rows


def trace(ops: CpuOps, step: Step, count: int) -> list[dict[str, Any]]:
    """Return a row for each call of a layer."""
    weights, arena = step.weights, step.arena(ops)
    traces: list[Tensor] = []
    for number in range(count + 2):  # the first ones warm up
        hidden = step.hidden.clone()
        rows = ops.traced(
            lambda hidden=hidden: ops.run_layers(
                hidden, weights.layers, step.rows, step.rope, arena, step.wanted
            ),
            _CALLS_MOST,
        )
        traces += [rows] if number > 1 else []
    return per_call(torch.stack(traces), len(weights.layers))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="0.5B", choices=MODELS)
    parser.add_argument("--level", default=native.chosen_isa())
    parser.add_argument("--threads", default=len(os.sched_getaffinity(0)), type=int)
    parser.add_argument("--prompts", default=[128, 512], type=numbers)
    parser.add_argument("--decodes", default=[1, 8], type=numbers)
    parser.add_argument("--context", default=256, type=int)
    parser.add_argument("--steps", default=20, type=int)
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    ops = loaded(native.LIBRARY_FOLDER, given.level, given.threads)
    weights = Weights(given.model)
    cases = [("prompt", size, 1, size, size) for size in given.prompts]
    cases += [("decode", seqs, seqs, 1, given.context) for seqs in given.decodes]
    found = [
        {"of": of, "size": size, **row}
        for of, size, seqs, new, context in cases
        for row in trace(ops, Step(weights, seqs, new, context), given.steps)
    ]
    report(
        {"calls": found}, given.out, model=given.model, level=given.level, threads=given.threads,
        context=given.context, steps=given.steps,
    )  # fmt: skip


if __name__ == "__main__":
    main()
