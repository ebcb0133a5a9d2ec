"""GEMM dataflows for weights that live in host, peer or local GPU memory."""
