"""What the tests of the documents read: pages, the commands in them, the figures in them."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
