"""One launcher per dataflow: each computes out[M, N] = x[M, K] W[N, K]^T (+ bias)."""
