"""Benchmarks, and scripts, are files beside each other: they import one another by file name."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "scripts")]
