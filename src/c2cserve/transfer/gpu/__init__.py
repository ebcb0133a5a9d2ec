"""The links of GPUs: copy engines, and relay kernels on neighbours."""
