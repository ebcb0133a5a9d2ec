"""Records random worlds: `python record_worlds.py FOLDER FIRST LAST pure|compiled`.

A file for each seed has all events and actions of every tick, and the report."""

import sys
from pathlib import Path

from c2cserve.sim import compiled

FOLDER, FIRST, LAST, KIND = sys.argv[1:]

assert compiled.use() == (KIND == "compiled"), compiled.status()

import msgspec  # noqa: E402
from worlds import world  # noqa: E402

import c2cserve.policy.slice.policy as decides  # noqa: E402
from c2cserve.sim.recording import RecordFile  # noqa: E402
from c2cserve.sim.report import report  # noqa: E402

assert str(decides.__file__).endswith(".py") == (KIND == "pure")

for seed in range(int(FIRST), int(LAST)):
    record = RecordFile(Path(FOLDER) / f"{seed}.record")
    simulation = world(seed, recorders=record)
    simulation.run()
    record.close()
    (Path(FOLDER) / f"{seed}.json").write_bytes(msgspec.json.encode(report(simulation).as_json()))
