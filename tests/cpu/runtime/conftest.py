"""The virtual worlds of the policies' tests also make the records that are replayed here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "policy"))
