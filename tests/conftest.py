"""CI draws the same examples every time; everybody else new ones (a find becomes a test first).

Triton's kernels run interpreted where there is no GPU. They are what that is decided for when they
are imported, so it is decided here."""

import os
from pathlib import Path

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
