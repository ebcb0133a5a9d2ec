"""Kernels built ahead of time: variants, compiler, repository."""
