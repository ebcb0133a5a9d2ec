"""Two small tokenizers of the kinds the served models have, written as checkpoint directories."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIALS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
EOS = 2
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the answer is 42.",
    "once upon a time there was a stop sign; it said STOP and END.",
    "größe naïve café 你好世界 👋🏽 emoji 👩‍👩‍👧 日本語のテキスト",
]
WORDS = ("the", "hello", "world", "stop", "answer", "is", "and")

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{%- endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def byte_level(directory: Path) -> Path:
    """Like Llama 3 and Qwen: every byte has a token; BOS is added to plain text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 1)]
    )
    return _save(tokenizer, directory, {"bos_token": "<|bos|>", "eos_token": "<|eos|>"})


def sentencepiece_like(directory: Path) -> Path:
    """Like Llama 2 and Mistral: spaces are U+2581, what has no token is spelled in byte tokens."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for char in "▁abcdefghijklmnopqrstuvwxyzéö.,!0123456789":
        vocab[char] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        left = "▁"
        for char in word:
            if left + char not in vocab:
                vocab[left + char] = len(vocab)
                merges.append((left, char))
            left += char
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    fields = json.loads(tokenizer.to_str())
    fields["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return _save(tokenizer, directory, {"bos_token": "<s>", "eos_token": "</s>"})


def _save(tokenizer: Tokenizer, directory: Path, config: dict[str, str]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory
