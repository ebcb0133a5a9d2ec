"""Keys are read from files that are private, and shown nowhere."""

import subprocess
import sys
from pathlib import Path

import pytest

from c2cserve.runtime.environment import child_environment
from c2cserve.server.settings import AccessSettings, ServerSettings
from c2cserve.serving.key_secrecy import choose_admin_key, exposures, read_key
from c2cserve.terminal.output import CliError

WIDE = ServerSettings(access=AccessSettings(loopback_only=False))


def test_a_key_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("  abc-123\n")
    path.chmod(0o640)
    assert read_key(path) == "abc-123"
    assert choose_admin_key("", path) == "abc-123"
    assert choose_admin_key("given", None) == "given"
    assert choose_admin_key("", None) == ""
    with pytest.raises(CliError, match="both given"):
        choose_admin_key("given", path)
    path.chmod(0o644)
    with pytest.raises(CliError, match="chmod o-rwx") as refused:
        read_key(path)
    assert "abc" not in str(refused.value)


def test_children_get_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {"C2CSERVE_API_KEYS": "a", "C2CSERVE_ADMIN_KEY": "b", "HF_TOKEN": "c"}
    for name, value in {**secret, "C2CSERVE_CPU_ISA": "avx2", "KEY": "x"}.items():
        monkeypatch.setenv(name, value)
    environment = child_environment(MORE="1")
    assert not secret.keys() & environment.keys()
    assert environment["C2CSERVE_CPU_ISA"] == "avx2"
    assert (environment["KEY"], environment["MORE"]) == ("x", "1")


HIDES = """
import sys
from c2cserve.serving.key_secrecy import hide_keys
hide_keys()
print(open("/proc/self/cmdline").read().split("\\0")[2:-1], sys.argv[1:], flush=True)
"""


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--api-key", "abc", "--port", "1"], ["--api-key", "xxx", "--port", "1"]),
        (["--admin-key=abc", "--api-key="], ["--admin-key=xxx", "--api-key="]),
        (["--api-key", "--api-key", "--api-key", "é"], ["--api-key", "x" * 9, "--api-key", "xx"]),
        (["--api-key"], ["--api-key"]),
        (["--api-keys", "abc", "abc"], ["--api-keys", "abc", "abc"]),
    ],
)
def test_keys_are_overwritten_in_ps(tmp_path: Path, given: list[str], shown: list[str]) -> None:
    script = tmp_path / "hides.py"
    script.write_text(HIDES)
    done = subprocess.run(
        [sys.executable, str(script), *given], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"{shown} {given}", "what was read before stays"


def test_no_keys_and_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["c2cserve", "serve"])
    assert list(exposures(ServerSettings(), "127.0.0.1", keys=False)) == []
    assert list(exposures(WIDE, "0.0.0.0", keys=True)) == []
    (warning,) = exposures(WIDE, "0.0.0.0", keys=False)
    assert "NO API KEYS" in warning
    monkeypatch.setattr(sys, "argv", ["c2cserve", "serve", "--admin-key=k", "--api-key", "k"])
    warnings = list(exposures(WIDE, "0.0.0.0", keys=True))
    assert len(warnings) == 2
    assert "--admin-key-file" in "".join(warnings)
