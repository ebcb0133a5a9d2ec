"""The client matrix: installs each client, runs its program against a server, writes the table."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from c2cserve.bench.specialists import running_server

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
SPECIALISTS = ROOT / "examples" / "specialists"
PAGE = ROOT / "docs" / "clients.md"
TABLE = re.compile(r"^\| client \| version \|(.*\n)(\|.*\n)*", re.MULTILINE)
FEATURES = {
    "models": "lists of models",
    "chat": "a chat in one piece",
    "stream": "a stream, with its usage where the client has that",
    "text": "completions of plain texts",
    "tools": "calls of tools, forced where the API can, and their results sent back",
    "structured": "answers that are held to a schema",
    "responses": "OpenAI's Responses, whole and streamed",
    "tokens": "counting tokens",
    "likelihood": "log-likelihoods of given texts",
    "errors": "errors of the client's own types, with what the server says",
}
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if tools %}{# <tool_call>{...}</tool_call> #}{% endif %}<|assistant|>"
)
"""Names the format of calls for the model `caller`. Its calls are forced: it was trained for none.
"""
_PROGRAM_S = 900.0


@dataclass(frozen=True)
class Client:
    name: str
    program: str
    """A file of `programs`."""
    folder: str = ""
    """Where its packages are installed; empty if it needs none."""
    packages: tuple[str, ...] = ()
    """The first one is the client, whose version is shown."""

    @property
    def node(self) -> bool:
        return self.program.endswith(".mjs")


CLIENTS = (
    Client("openai, Python", "openai_python.py", "openai", ("openai",)),
    Client("openai, Node", "openai_node.mjs", "node", ("openai",)),
    Client("anthropic", "anthropic_python.py", "anthropic", ("anthropic",)),
    Client("ollama", "ollama_python.py", "ollama", ("ollama",)),
    Client("LiteLLM, SDK", "litellm_sdk.py", "litellm", ("litellm[proxy]",)),
    Client("LiteLLM, proxy", "litellm_proxy.py", "litellm", ("litellm[proxy]",)),
    Client("LangChain", "langchain_openai_.py", "langchain", ("langchain-openai",)),
    Client("LlamaIndex", "llama_index_.py", "llama-index", ("llama-index-llms-openai-like",)),
    Client("Instructor", "instructor_.py", "instructor", ("instructor",)),
    Client("GuideLLM", "guidellm_.py", "guidellm", ("guidellm",)),
    Client("lm-eval", "lm_eval_.py", "lm-eval", ("lm-eval[api]", "transformers")),
    Client("Open WebUI's requests", "open_webui.py"),
)


@dataclass(frozen=True)
class Outcome:
    client: Client
    version: str
    errors: Mapping[str, str]
    """Feature -> what went wrong; empty if it works. Others have no part in the client."""


def install(client: Client, packages: Path) -> Path:
    """Install a client's packages, unless they are there. Return what runs its program. Raises
    CalledProcessError."""
    folder = packages / client.folder
    if not client.folder:
        return Path(sys.executable)
    runs = Path(shutil.which("node") or "node") if client.node else folder / "bin" / "python"
    marker = folder / ".installed"
    wanted = " ".join(client.packages)
    if marker.is_file() and marker.read_text() == wanted:
        return runs
    print(f"{client.name}: installing {wanted}", file=sys.stderr)
    if client.node:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}")
        command = ["npm", "install", "--silent", "--no-fund", "--no-audit", *client.packages]
        subprocess.run(command, cwd=folder, check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(runs), "-m", "pip", "install", "-q", *client.packages], check=True)
    marker.write_text(wanted)
    return runs


def version_of(client: Client, runs: Path, packages: Path) -> str:
    if not client.folder:
        return ""
    name = client.packages[0].partition("[")[0]
    if client.node:
        text = (packages / client.folder / "node_modules" / name / "package.json").read_text()
        return str(json.loads(text)["version"])
    ask = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run(
        [str(runs), "-c", ask], check=True, capture_output=True, text=True
    ).stdout.strip()


def run(client: Client, url: str, packages: Path) -> Outcome:
    """Run a client's program against the server. One that ends early has no feature at all."""
    runs = install(client, packages)
    program = PROGRAMS / client.program
    if client.node:  # modules are looked for beside the program
        program = Path(shutil.copy(program, packages / client.folder))
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = {**kept, "C2CSERVE_URL": url, "C2CSERVE_SPECIALISTS": str(SPECIALISTS)}
    done = subprocess.run(
        [str(runs), str(program)], env=env, capture_output=True, text=True, timeout=_PROGRAM_S,
        check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"feature"')]
    errors = {one["feature"]: one["error"] for one in map(json.loads, lines)}
    if done.returncode or not errors:
        errors["chat"] = " ".join(done.stderr.split())[-300:] or "the program said nothing"
    return Outcome(client, version_of(client, runs, packages), errors)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the matrix as Markdown. Raises ValueError for a feature that it has no column for."""
    heads = ["client", "version", *FEATURES]
    rows = [heads, ["---", "---", *(":-:" for _ in FEATURES)]]
    for one in outcomes:
        if unknown := one.errors.keys() - FEATURES.keys():
            raise ValueError(f"{one.client.name}: {sorted(unknown)} are no features")
        marks = ["no" if one.errors[f] else "yes" for f in FEATURES if f in one.errors]
        places = iter(marks)
        cells = [next(places) if f in one.errors else "" for f in FEATURES]
        rows.append([one.client.name, one.version, *cells])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def catalogue(folder: Path) -> Path:
    """Write the specialists' catalogue with a model that takes tools. Return its path."""
    shutil.copytree(SPECIALISTS / "chatter-qwen2", folder / "caller")
    (folder / "caller" / "chat_template.jinja").write_text(_TEMPLATE)
    text = (SPECIALISTS / "catalog.toml").read_text()
    text = text.replace('path = "', f'path = "{SPECIALISTS}/')
    path = folder / "catalog.toml"
    path.write_text(f'{text}\n[[models]]\nid = "caller"\npath = "caller"\n')
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--packages", type=Path, default=Path(tempfile.gettempdir()) / "c2cserve-clients"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="clients, by folder; no table")
    parser.add_argument("--dry", action="store_true", help="print the table, do not write it")
    options = parser.parse_args()
    clients = [one for one in CLIENTS if not options.only or one.folder in options.only]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(catalogue(Path(folder))) as (url, _),
    ):
        outcomes = [run(one, url, options.packages) for one in clients]
    for one in outcomes:
        for feature, error in one.errors.items():
            if error:
                print(f"{one.client.name}: {feature}: {error}", file=sys.stderr)
    written = table(outcomes)
    if options.dry or options.only:
        print(written, end="")
    else:
        PAGE.write_text(TABLE.sub(written, PAGE.read_text(), count=1))
    return int(any(error for one in outcomes for error in one.errors.values()))


if __name__ == "__main__":
    sys.exit(main())
