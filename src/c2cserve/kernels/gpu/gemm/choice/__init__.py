"""Which dataflow a GEMM takes: profile, cost model, candidates."""
