"""The official clients of other APIs, and what several tests of doors say and ask."""

from typing import Any

import anthropic
import ollama
from served import Served
from small_tokenizers import EOS
from tokenizers import Tokenizer

CALLER = "caller"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def says(served: Served, byte: Tokenizer, text: str, **how: Any) -> int:
    """Make every job answer with a text from now on. Return its tokens, the end token included."""
    tokens = [*byte.encode(text, add_special_tokens=False).ids, EOS]
    served.says(tokens, **how)
    return len(tokens)


def prompt(served: Served, byte: Tokenizer) -> str:
    """Return the prompt of the last job."""
    return byte.decode(list(served.job.tokens), skip_special_tokens=False)


def anthropic_client(served: Served, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0)


def ollama_client(served: Served, key: str = "none") -> ollama.Client:
    return ollama.Client(host=served.url, headers={"authorization": f"Bearer {key}"})
