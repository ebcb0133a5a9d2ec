"""The kernel times that simulated GPUs have (`c2cserve.sim.world.tables`), from committed results.

python benchmarks/kernel_times.py > src/c2cserve/sim/data/tables/h200_kernels.json

GEMMs of up to 64 rows are ours, as `c2cserve profile` timed those that a slice launches. Longer
ones are cuBLAS's of dense models, as `gemm.py` timed them beside ours. Attention is ours of
`attention.py`. Nothing is run. Steps of whole models, which `cost_model.py` judges, are in none.

`gemm.py` repeats a chain of 16 GEMMs. The longer that takes, the lower is the rate:

    rate     780 ~~~~~~~~~~~~~~~~\\_
    TFLOP/s                        \\__________________ 688
    after      0       20       40 ms ... 100 ms     800 ms

So long chains were timed at the GPU's power limit, and short ones were not. Both rates are medians
here, and how soon one becomes the other is fitted. All GEMMs are brought to the full clock by that.

The shortest attention that was timed has 512 tokens. Shorter one is what a decode step of one
request takes less with few tokens, by a live run that `cost_model.py` does not judge by. What
norms, activations and launches take is the rest of a decode step of one request, which was timed
with its attention. These two are all that is of steps. Neither is judged.
"""

import json
from collections.abc import Sequence
from math import ceil, exp, log
from pathlib import Path
from statistics import mean, median
from typing import Any

from c2cserve.kernels.gpu.gemm.choice.choose import ROWS_STREAMED, Chooser
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.choice.profile import load_profile
from c2cserve.sim.world.shapes import shape_of
from c2cserve.sim.world.tables import interpolate, linear_bytes

RESULTS = Path(__file__).parent / "results"
GEMMS, ATTENTION = "gemm_h200x2.json", "attention_h200.json"
PROFILE = "profile_h200x2.json"
SHORT = "weights_mix_h200_eighth.json"
"""Its decode steps of one request, with few tokens and with many."""
STEP, _STEP_NAME = "gpu_engine_h200.json", "decode at batch 1, weights in HBM"
"""A step of one request."""
_SHAPE = "llama-8b"
_SHAPES = {"llama-3b": "llama-3.2-3b", "llama-8b": "llama-3.1-8b"}
_FEW = 8
"""Sequences from which on all SMs have work."""
_OWN_ROWS = ((1, 1), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64))
"""Rows, and those with which their kernel was timed: there is one for 16 rows, one for 32 and one
for 64."""
_CHAIN, _REPLAYS, _TIMED_S = 16, 5, 0.02
"""GEMMs of a chain, and for how many replays and how long `gemm.py` times it, at least."""
_BOUND_FLOPS = 6e14
"""GEMMs that reach this rate wait for arithmetic."""
_FULL_ROWS, _FULL_S, _SUSTAINED_S = 2048, 0.02, 0.1
"""GEMMs whose rates are those of the full clock: of so many rows, within so many seconds. After the
last number of seconds the rate is the sustained one."""

Timed = tuple[float, float]
"""When the median replay of a chain was, after the first one began; FLOP per second."""


def table() -> dict[str, Any]:
    """Return the file's content: times in microseconds."""
    gemms, attention = _read(GEMMS), _read(ATTENTION)
    rows = [row for row in gemms["table"]["rows"] if not row["experts"]]
    cases = attention["shapes"][_SHAPE]["cases"]
    power = _power([row for row in rows if row["m"] >= _FULL_ROWS])
    own = _own(gemms["gpu"], gemms["sms"])
    return {
        "origin": "benchmarks/kernel_times.py, of benchmarks/results/"
        f"{PROFILE}, {GEMMS}, {ATTENTION}, {SHORT} and {STEP}",
        "sms": gemms["sms"],
        "power": power,
        "gemm": [*own, *_gemms(rows, power)],
        "others_us": _others_us(own[0]["us"]),
        "attention": _attention(cases),
    }


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())["results"]


# ---- GEMMs --------------------------------------------------------------------------------------


def _timed(row: dict[str, Any]) -> Timed:
    chain_s = _CHAIN * row["cublas_s"]
    replays = max(_REPLAYS, ceil(_TIMED_S / chain_s))
    return chain_s * (1 + replays / 2), row["m"] * row["weight_bytes"] / row["cublas_s"]


def _power(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return how many times as long GEMMs take at the power limit, and how soon."""
    timed = [_timed(row) for row in rows]
    full = median(rate for after_s, rate in timed if after_s <= _FULL_S)
    sustained = full / median(rate for after_s, rate in timed if after_s >= _SUSTAINED_S)

    def error(settle_s: float) -> float:
        return sum(log(full / rate / _slowed(after_s, sustained, settle_s)) ** 2
                   for after_s, rate in timed)  # fmt: skip

    settle_s = min((ms / 1e3 for ms in range(5, 300)), key=error)
    return {"sustained": round(sustained, 3), "settle_s": settle_s}


def _slowed(after_s: float, sustained: float, settle_s: float) -> float:
    """Return how many times as long arithmetic takes after so many seconds of it."""
    return 1.0 + (sustained - 1.0) * (1.0 - exp(-after_s / settle_s))


def _gemms(rows: Sequence[dict[str, Any]], power: dict[str, float]) -> list[dict[str, Any]]:
    """Return (weight bytes, microseconds) of dense GEMMs, by rows, at the full clock. Each was
    timed for both homes of our own kernels' weights; cuBLAS had them in HBM."""
    found: dict[int, dict[float, list[float]]] = {}
    for row in rows:
        after_s, rate = _timed(row)
        slowed = _slowed(after_s, **power) if rate >= _BOUND_FLOPS else 1.0
        by_size = found.setdefault(row["m"], {})
        by_size.setdefault(row["weight_bytes"], []).append(row["cublas_s"] / slowed)
    return [
        {
            "rows": max(m, ROWS_STREAMED + 1),
            "us": [(size, _us(mean(times))) for size, times in sorted(by_size.items())],
        }
        for m, by_size in sorted(found.items())
        if m >= ROWS_STREAMED
    ]  # fmt: skip


def _own(gpu: str, sms: int) -> list[dict[str, Any]]:
    """Return (weight bytes, microseconds) of the kernels that a slice launches for few rows, of all
    shapes that the profile has."""
    profile = load_profile(RESULTS / PROFILE, gpu=gpu)
    chooser = Chooser(profile)
    shapes = {(one.n, one.k) for one in profile.points if one.home == "hbm" and one.sms == sms}

    def seconds(rows: int, n: int, k: int) -> float:
        asked = Question(rows, n, k, "bfloat16", "hbm", sms, by_map=True)
        return predicted_s(chooser, asked, chooser)

    return [
        {
            "rows": rows,
            "us": sorted((float(2 * n * k), _us(seconds(timed, n, k))) for n, k in shapes),
        }
        for rows, timed in _OWN_ROWS
    ]


def predicted_s(chooser: Chooser, asked: Question, picker: Chooser) -> float:
    """Return what `chooser` says of the kernel that a slice launches by `picker`."""
    dataflow, tiles = picker.serving(asked)
    [found, *_] = [
        one for one in chooser.estimates(asked)
        if (one.dataflow, one.tiles.bx, one.tiles.cluster) == (dataflow, tiles.bx, tiles.cluster)
    ]  # fmt: skip
    return found.predicted_s


def _others_us(one_row: Sequence[tuple[float, float]]) -> float:
    """Return the microseconds of a layer that are neither GEMMs nor attention."""
    figures = _read(STEP)["shapes"][_SHAPE]["figures"]
    [step] = [one for one in figures if one["what"] == _STEP_NAME]
    shape = shape_of(_SHAPES[_SHAPE])
    gemms_us = shape.layers * sum(interpolate(one_row, size) for size in linear_bytes(shape))
    gemms_us += interpolate(one_row, shape.item_bytes * shape.vocabulary_parameters)
    rest_us = 1e6 * (step["seconds"] - step["attention_s"]) - gemms_us
    return round(rest_us / shape.layers, 2)


# ---- attention ----------------------------------------------------------------------------------


def _attention(cases: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    decodes: dict[float, list[float]] = {}
    one: list[tuple[float, float]] = []
    prompts: list[tuple[float, float]] = []
    for case in cases:
        took_s = case["ours"]["seconds"]
        if len(case["new"]) == 1 and case["new"][0] > 1:
            prompts.append((case["flops"], _us(took_s)))
        elif set(case["new"]) == {1}:
            if len(case["new"]) == 1:
                one.append((case["kv_bytes"], _us(took_s)))
            if len(case["new"]) >= _FEW:
                decodes.setdefault(case["kv_bytes"], []).append(took_s)
    many = [(size, _us(mean(times))) for size, times in sorted(decodes.items())]
    one.sort()
    short = _short(one)
    return {
        "decodes_us": [short, *many], "one_decode_us": [short, *one],
        "prompts_us": sorted(prompts),
    }  # fmt: skip


def _short(one: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the attention of one sequence with few tokens, of that with more: bytes of keys and
    values of a layer, microseconds. It is a mean over models."""
    found: list[tuple[float, float]] = []
    for name, by_length in _read(SHORT)["times"]["decode"].items():
        shape = shape_of(_SHAPES[name])
        (few, [(_, few_s), *_]), (many, [(_, many_s), *_]) = sorted(
            (int(length), points) for length, points in by_length.items()
        )
        token_bytes = shape.kv_token_bytes / shape.layers
        less_us = 1e6 * (many_s - few_s) / shape.layers
        found.append((few * token_bytes, interpolate(one, many * token_bytes) - less_us))
    return mean(size for size, _ in found), round(mean(us for _, us in found), 2)


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 2)


if __name__ == "__main__":
    print(json.dumps(table(), indent=1))
