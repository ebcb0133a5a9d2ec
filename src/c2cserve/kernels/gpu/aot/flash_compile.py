"""Have FlashInfer compile one module: `flash_modules.build` runs this in a process of its own.

python -m c2cserve.kernels.gpu.aot.flash_compile DTYPE HEAD_DIM WINDOWED FOLDER
"""

import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


def main(arguments: list[str]) -> None:
    """Leaves FOLDER/<module>/<module>.so."""
    name, head_dim, windowed, folder = arguments
    dtype, dim = getattr(torch, name), int(head_dim)
    jit: Any = import_module("flashinfer.jit")
    positions, cap, narrow_products = 0, False, False
    spec = jit.gen_batch_prefill_module(
        "fa3", dtype, dtype, dtype, torch.int32, dim, dim, positions, windowed == "1", cap,
        narrow_products,
    )  # fmt: skip
    spec.build()
    made = Path(folder) / spec.name
    made.mkdir(parents=True)
    shutil.copy(spec.jit_library_path, made / f"{spec.name}.so")


if __name__ == "__main__":
    main(sys.argv[1:])
