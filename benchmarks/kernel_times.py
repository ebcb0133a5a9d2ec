"""The kernel times that simulated GPUs have (`c2cserve.sim.world.tables`), from committed results.

python benchmarks/kernel_times.py > src/c2cserve/sim/data/tables/h200_kernels.json

GEMMs are cuBLAS's of dense models, as `gemm.py` timed them beside ours. Attention is ours of
`attention.py`. Nothing is run. Steps of whole models, which `cost_model.py` judges, are in neither.
"""

import json
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).parent / "results"
GEMMS, ATTENTION = "gemm_h200x2.json", "attention_h200.json"
_SHAPE = "llama-8b"
_FEW = 8
"""Sequences from which on all SMs have work."""


def table() -> dict[str, Any]:
    """Return the file's content: times in microseconds."""
    gemms, attention = _read(GEMMS), _read(ATTENTION)
    return {
        "origin": f"benchmarks/kernel_times.py, of benchmarks/results/{GEMMS} and {ATTENTION}",
        "sms": gemms["sms"],
        "gemm": _gemms(gemms["table"]["rows"]),
        "attention": _attention(attention["shapes"][_SHAPE]["cases"]),
    }


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())["results"]


def _gemms(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return (weight bytes, microseconds) of dense GEMMs, by rows. Each was timed for both homes of
    our own kernels' weights; cuBLAS had them in HBM."""
    found: dict[int, dict[float, list[float]]] = {}
    for row in rows:
        if not row["experts"]:
            by_size = found.setdefault(row["m"], {})
            by_size.setdefault(row["weight_bytes"], []).append(row["cublas_s"])
    return [
        {"rows": m, "us": [(size, _us(mean(times))) for size, times in sorted(by_size.items())]}
        for m, by_size in sorted(found.items())
    ]


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
    return {"decodes_us": many, "one_decode_us": sorted(one), "prompts_us": sorted(prompts)}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 2)


if __name__ == "__main__":
    print(json.dumps(table(), indent=1))
