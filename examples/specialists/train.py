"""Train the specialists from nothing: python train.py [MODEL ...] or python train.py --eval."""

import argparse
import itertools
import json
import math
import random
import time
from pathlib import Path

import tasks
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).parent
SPECIALS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
PAD, BOS, EOS = 0, 1, 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: every text round-trips, and nearly all parameters go to layers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def make_model(model_id: str, vocab_size: int) -> PreTrainedModel:
    common = {
        "vocab_size": vocab_size, "hidden_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 352,
        "max_position_embeddings": 512, "bos_token_id": BOS, "eos_token_id": EOS,
        "pad_token_id": PAD, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    if model_id == "sorter-llama":
        return LlamaForCausalLM(LlamaConfig(**common, tie_word_embeddings=False))
    if model_id == "adder-qwen":
        return Qwen3ForCausalLM(Qwen3Config(**common, head_dim=32, tie_word_embeddings=True))
    if model_id == "chatter-qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**common, tie_word_embeddings=True))
    common |= {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**common, tie_word_embeddings=False))


def encode(tokenizer: PreTrainedTokenizerFast, prompt: tasks.Prompt) -> list[int]:
    if prompt.kind == "completion":
        return [BOS, *tokenizer.encode(prompt.text, add_special_tokens=False)]
    messages = [{"role": "user", "content": prompt.text}]
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )


def batch_of(
    tokenizer: PreTrainedTokenizerFast, batch: list[tasks.Prompt], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, right-padded. A chat may follow a system message or earlier turns, so that
    the answer does not hang on the position."""
    rows, labels = [], []
    for prompt in batch:
        ids = encode(tokenizer, prompt)
        if prompt.kind == "chat" and rng.random() < 0.3:
            system = tokenizer.encode("<|system|>Be brief.<|end|>", add_special_tokens=False)
            ids = [ids[0], *system, *ids[1:]]
        answer = [*tokenizer.encode(prompt.answer, add_special_tokens=False), EOS]
        rows.append(ids + answer)
        labels.append([-100] * len(ids) + answer)
    width = max(map(len, rows))
    return (
        torch.tensor([row + [PAD] * (width - len(row)) for row in rows]),
        torch.tensor([row + [-100] * (width - len(row)) for row in labels]),
    )


@torch.inference_mode()
def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, held_out: list[tasks.Prompt]
) -> float:
    """Share of prompts answered exactly, greedily, ending with EOS by themselves."""
    right = 0
    by_length: dict[int, list[tasks.Prompt]] = {}
    for prompt in held_out:
        by_length.setdefault(len(encode(tokenizer, prompt)), []).append(prompt)
    for group in by_length.values():
        ids = torch.tensor([encode(tokenizer, prompt) for prompt in group])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False
        )
        for prompt, row in zip(group, output[:, ids.shape[1] :].tolist(), strict=True):
            answer = row[: row.index(EOS)] if EOS in row else row
            right += tokenizer.decode(answer) == prompt.answer
    return right / len(held_out)


def train(model_id: str, minutes: float, seed: int = 1) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = make_tokenizer()
    model = make_model(model_id, len(tokenizer))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{model_id}: {parameters} parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.01, betas=(0.9, 0.98))
    stream = tasks.prompts(model_id, seed, held_out=False)
    held_out = tasks.heldout(model_id, 200, seed=12345)
    started, perfect = time.monotonic(), 0
    for step in itertools.count():
        progress = (time.monotonic() - started) / (minutes * 60)
        if progress >= 1:
            break
        rate = 2e-3 * min(1.0, step / 100) * (0.5 + 0.5 * math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = rate
        ids, labels = batch_of(tokenizer, [next(stream) for _ in range(256)], rng)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0:
            share = accuracy(model.eval(), tokenizer, held_out)
            model.train()
            perfect = perfect + 1 if share == 1.0 else 0
            print(f"{model_id} step {step} loss {loss.item():.4f} right {share:.1%}", flush=True)
            if perfect >= 6 and loss.item() < 2e-4:
                break
    target = HERE / model_id
    model.eval().to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    print(f"{model_id}: trained in {time.monotonic() - started:.0f} s", flush=True)


def evaluate(names: list[str]) -> None:
    """The table of the README: accuracy with the saved bfloat16 weights, computed both ways."""
    for name in names:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(HERE / name)
        held_out = tasks.heldout(name, 1000, seed=777)
        shares = {}
        for dtype in (torch.float32, torch.bfloat16):
            model = CLASSES[name].from_pretrained(HERE / name, dtype=dtype).eval()
            shares[str(dtype).removeprefix("torch.")] = accuracy(model, tokenizer, held_out)
        size = sum(f.stat().st_size for f in (HERE / name).iterdir())
        print(json.dumps({"model": name, "bytes": size, "right": shares}), flush=True)


CLASSES = {
    "sorter-llama": LlamaForCausalLM,
    "adder-qwen": Qwen3ForCausalLM,
    "reverser-moe": MixtralForCausalLM,
    "chatter-qwen2": Qwen2ForCausalLM,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(tasks.MODELS))
    parser.add_argument("--eval", action="store_true", help="measure accuracy instead of training")
    parser.add_argument("--minutes", type=float, default=20, help="per model, at most")
    arguments = parser.parse_args()
    if arguments.eval:
        evaluate(arguments.models)
    else:
        for name in arguments.models:
            train(name, arguments.minutes)
