"""What a step costs beside its arithmetic: decode steps of a model so small that little else is
left, with policy and batching, in one process.

    python benchmarks/step_overhead.py [--checkpoint DIR] [--threads 1] [--out FILE.json]
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
    """Mean over a run of steps in which nothing joins or leaves."""
    prompts = [[10 + (7 * i + j) % 180 for j in range(PROMPT)] for i in range(batch)]
    answers = engine.run(prompts, [STEPS + 1] * batch)
    first, last = (max(getattr(a, at) for a in answers) for at in ("first_s", "last_s"))
    return (last - first) / STEPS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=SPECIALISTS / "sorter-llama")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine = LocalEngine(arguments.checkpoint, range(arguments.threads), kv_bytes=64 << 20)
    times: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    try:
        for _ in range(arguments.rounds):  # taking turns, so that drift hits all alike
            for batch, taken in times.items():
                taken.append(step_us(engine, batch))
    finally:
        engine.close()
    results = {
        f"batch_{batch}": {"best_us": min(taken), "p50_us": statistics.median(taken)}
        for batch, taken in times.items()
    }
    report(results, arguments.out, checkpoint=arguments.checkpoint.name, threads=arguments.threads)


if __name__ == "__main__":
    main()
