"""Triton kernels that start while the one before them still runs (programmatic dependent launch).

A kernel begins when all of the one before it has begun, and waits until that has ended. It lets
the next one begin meanwhile. So the cost of a launch is hidden behind the kernel before it, and a
GEMM that follows has its first weights on their way. Every kernel launched so
must begin with `after_others`; one that is launched plainly waits anyway. Source: CUDA programming
guide, "Programmatic Dependent Launch".
"""

# Device code is Triton's language, with its own types and its constants in capitals.
# pyright: basic, reportAttributeAccessIssue=false
# ruff: noqa: N803

import triton
import triton.language as tl

_INTERPRETED = triton.knobs.runtime.interpret
PDL_OPTIONS = {"PDL": False} if _INTERPRETED else {"PDL": True, "launch_pdl": True}
"""Launch options. Interpreted kernels run one after another."""


@triton.jit
def after_others(PDL: tl.constexpr):
    """First thing in a kernel. After it what earlier kernels wrote is there, and what they read may
    be written."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
