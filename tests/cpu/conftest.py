"""What tests of several packages share."""

from collections.abc import Callable
from pathlib import Path

import pytest

FakeNvcc = Callable[..., Path]

_FAKE_NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake compiler, release 13"; exit; fi
echo "$@" >> {log}
for word; do [ "$last" = -o ] && output=$word; last=$word; done
printf 'half of a ' > "$output"
sleep {pause_s}
printf 'kernel' >> "$output"
cat >&2 <<'END'
{says}
END
exit {status}
"""
_ALL_WELL = """ptxas info    : Compiling entry function 'direct' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers"""


@pytest.fixture
def fake_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvcc:
    """Install a compiler that is quick and does as told, for this process and those it starts:
    `fake_nvcc(pause_s=0, says=..., status=0)`. Every cubin it makes is `half of a kernel`. Returns
    the file it notes its command lines in."""
    home, log = tmp_path / "fake-cuda", tmp_path / "nvcc.log"
    (home / "bin").mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(home))

    def install(pause_s: float = 0, says: str = _ALL_WELL, status: int = 0) -> Path:
        nvcc = home / "bin" / "nvcc"
        nvcc.write_text(_FAKE_NVCC.format(log=log, pause_s=pause_s, says=says, status=status))
        nvcc.chmod(0o755)
        return log

    return install
