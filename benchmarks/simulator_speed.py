"""How fast the simulator is, on one core: requests, loop ticks and decode steps per second: JSON.

python benchmarks/simulator_speed.py [--requests N] [--seed N] [--pure] [--out FILE]

  served         what a user would simulate: 128 models of 3B on four H200s, which hold a part of
                 them, 5 requests a second by Zipf's law, prompts of 400 and answers of 150 tokens,
                 all in time; five times the requests of the others
  catalogue      256 models of 8B on 64 slices that hold their weights, a few requests each
  busy           the same slices with batches of tens
  streams        128 models of 3B on seven small slices whose weights come over one link
  single_steps   a tenth of `catalogue` with every decode step decided and simulated on its own

All with the default preset, compiled if they were built (`python -m c2cserve.sim.compiled`) and not
`--pure`. Invariants are checked throughout. CPU time is that of this process.
"""

import argparse
from pathlib import Path

from c2cserve.sim import compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pure", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    policies = compiled.status() if not options.pure and compiled.use() else "pure Python"
    from report import report  # what these import may be compiled from here on
    from simulator_loads import cases

    results = dict(cases(options.requests, options.seed))
    report(results, options.out, requests=options.requests, seed=options.seed, policies=policies)


if __name__ == "__main__":
    main()
