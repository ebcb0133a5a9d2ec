"""What a step costs beside its arithmetic: decode steps of a model so small that little else is
left, with policy and batching, in one process.

    python benchmarks/step_overhead.py [--checkpoint DIR] [--threads 1] [--models 1,8]
        [--out FILE.json]

With several models each has a request, and their steps take turns.
"""

import argparse
import statistics
from pathlib import Path

import torch
from local_engine import LocalEngine
from report import report

SPECIALISTS = Path(__file__).parent.parent / "examples" / "specialists"
BATCHES = (1, 2, 4, 8)
PROMPT, STEPS = 16, 200


def step_us(engine: LocalEngine, batch: int) -> float:
    """Mean over a run of steps in which nothing joins or leaves; `batch` requests of each model."""
    batch *= len(engine.models)
    prompts = [[10 + (7 * i + j) % 180 for j in range(PROMPT)] for i in range(batch)]
    answers = engine.run(prompts, [STEPS + 1] * batch)
    first, last = (max(getattr(a, at) for a in answers) for at in ("first_s", "last_s"))
    return (last - first) / STEPS / len(engine.models) * 1e6


def _name(models: int, batch: int) -> str:
    return f"batch_{batch}" if models == 1 else f"models_{models}_batch_{batch}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=SPECIALISTS / "sorter-llama")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", default="1", help="how many models take turns: 1,8")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cpus = range(arguments.threads)
    engines = {
        models: LocalEngine(arguments.checkpoint, cpus, kv_bytes=64 << 20, models=models)
        for models in map(int, arguments.models.split(","))
    }
    times: dict[tuple[int, int], list[float]] = {
        (models, batch): [] for models in engines for batch in BATCHES
    }
    try:
        for _ in range(arguments.rounds):  # taking turns, so that drift hits all alike
            for (models, batch), taken in times.items():
                taken.append(step_us(engines[models], batch))
    finally:
        for engine in engines.values():
            engine.close()
    results = {
        _name(*case): {"best_us": min(taken), "p50_us": statistics.median(taken)}
        for case, taken in times.items()
    }
    report(results, arguments.out, checkpoint=arguments.checkpoint.name, threads=arguments.threads)


if __name__ == "__main__":
    main()
