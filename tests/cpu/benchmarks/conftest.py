"""The benchmarks are scripts beside each other: they import one another by file name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
