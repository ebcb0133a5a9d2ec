"""lm-eval: a task of answers in completions and in chats, and one of log-likelihoods."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import KEY, URL, feature, same

_WORDS = ("abcd", "bdef", "aegk", "cdmn")
_COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/words.jsonl}}
test_split: test
doc_to_text: '{{question}}'
target_delimiter: ''
"""
_TASKS = {
    "answers": """
task: answers
output_type: generate_until
doc_to_target: '{{answer}}'
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "choices": """
task: choices
output_type: multiple_choice
doc_to_choice: "{{[answer, 'zzzz']}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
}


def run(kind: str, path: str, task: str, metric: str, *more: str) -> None:
    """Evaluate the model that sorts letters. Raises AssertionError unless it is always right."""
    with tempfile.TemporaryDirectory() as folder:
        questions = [
            {"question": f"sort: {''.join(reversed(word))} =>", "answer": word} for word in _WORDS
        ]
        (Path(folder) / "words.jsonl").write_text("\n".join(map(json.dumps, questions)))
        for name, text in _TASKS.items():
            common = _COMMON.replace("FOLDER", folder)
            (Path(folder) / f"{name}.yaml").write_text(text + common)
        where = f"base_url={URL}{path},model=sorter-llama,num_concurrent=2,max_retries=1"
        tokenizer = f"tokenizer={os.environ['C2CSERVE_SPECIALISTS']}/sorter-llama"
        command = [
            sys.executable, "-m", "lm_eval", "run", "--model", kind, "--tasks", task,
            "--model_args", f"{where},{tokenizer},add_bos_token=True",
            "--include_path", folder, "--output_path", f"{folder}/out", *more,
        ]  # fmt: skip
        offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": f"{folder}/hf"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False,
            env={**os.environ, **offline, "OPENAI_API_KEY": KEY},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-250:]
        (report,) = (Path(folder) / "out").rglob("results_*.json")
        found = json.loads(report.read_text())["results"][task]
        same([value for key, value in found.items() if key.startswith(f"{metric},")], [1.0])


COMPLETIONS = ("local-completions", "/v1/completions")
CHATS = ("local-chat-completions", "/v1/chat/completions")
feature("text", lambda: run(*COMPLETIONS, "answers", "exact_match"))
feature("likelihood", lambda: run(*COMPLETIONS, "choices", "acc"))
feature("chat", lambda: run(*CHATS, "answers", "exact_match", "--apply_chat_template"))
