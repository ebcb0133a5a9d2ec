"""GEMMs over weights in host, peer or local memory: operands and launches."""
