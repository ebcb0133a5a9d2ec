"""Dataflows of other systems, to be compared with: nothing that serves needs them."""
