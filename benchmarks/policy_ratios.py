"""c2cserve beside the published systems, simulated: requests in time, and ratios over seeds.

python benchmarks/policy_ratios.py [--seeds 3] [--jobs 2] [--only TEXT] [--traces DIR] [--quick]
    [--out FILE] [--table FILE.json]

A request is in time as SLINFER's study counts it (`c2cserve.sim.studies.slinfer.met`): the time in
which its instance loads is excused, for every system. All systems move weights at the speed of the
machine's links. A seed draws step times (noise of 5 %), which model gets which source of the trace,
and arrivals and lengths where the trace has none. `most` is the ratio if c2cserve had every request
in time. Loads that need a trace that is not packaged are left out without `--traces`.

Compiled policies are used if they were built (`python -m c2cserve.sim.compiled`): results are
equal.
`--quick` has the first 300 s of each load. `--table` prints what a file of results has.
"""

import argparse
from pathlib import Path

from c2cserve.sim import compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="simulations at a time")
    parser.add_argument("--only", default="", help="loads whose name contains this")
    parser.add_argument("--traces", type=Path, help="folder with traces that are not packaged")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of these results")
    options = parser.parse_args()
    policies = compiled.status() if compiled.use() else "pure Python"
    from ratio_loads import compare  # what this imports may be compiled from here on

    compare(options, policies)


if __name__ == "__main__":
    main()
