"""The papers' figures, simulated: `c2cserve simulate --study NAME`."""
