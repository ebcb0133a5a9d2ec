"""CI draws the same examples every time; everybody else new ones (a find becomes a test first)."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
