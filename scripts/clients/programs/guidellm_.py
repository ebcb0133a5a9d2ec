"""GuideLLM: twenty requests one by one, then several at a time. None of them may fail."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import MODEL, URL, feature, same

_COUNT = 20


def run(profile: str, form: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={form}",
            "--profile", profile, "--constraint", f"kind=max_requests,count={_COUNT}",
            "--tokenizer", f"kind=hf_auto,model={os.environ['C2CSERVE_SPECIALISTS']}/{MODEL}",
            "--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=12",
            "--output", f"kind=json,path={report}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, (done.stderr or done.stdout)[-250:]
        counts: dict[str, Any] = json.loads(report.read_text())["benchmarks"][0]["metrics"]
        totals = counts["request_totals"]
        same((totals["successful"], totals["errored"]), (_COUNT, 0))


feature("stream", lambda: run("kind=synchronous", "/v1/chat/completions"))
feature("text", lambda: run("kind=concurrent,streams=4", "/v1/completions"))
