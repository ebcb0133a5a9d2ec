"""Kernels of GPUs: GEMMs over weights in any memory, attention, sampling, and their builds."""
