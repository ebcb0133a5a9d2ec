"""Standard streams that were closed before this process began."""

import os
import sys


def open_missing_streams() -> None:
    """Open /dev/null as each standard stream that was closed (`2>&-`). Otherwise the first sockets
    and files would get their numbers, and what children write to stderr would go into them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open to the end
