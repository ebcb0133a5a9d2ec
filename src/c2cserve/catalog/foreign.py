"""Recognise by file names what is not a checkpoint for this server, and say what to do."""

from collections.abc import Collection

_ADAPTER = "adapter_config.json"
_PICKLED = (".bin", ".pt", ".pth")
_QUANTIZED = {"hf_quant_config.json": "ModelOpt", "quantize_config.json": "GPTQ"}
"""Files that tools leave beside the weights that they have quantized."""


def foreign_kind(names: Collection[str]) -> str | None:
    """Return what a directory with these files is and what to do, None if it may be a checkpoint.

    The text continues a sentence whose subject is the directory."""
    weights = [name for name in names if name.endswith(".safetensors")]
    full = [name for name in weights if not name.startswith("adapter")]
    if _ADAPTER in names and not full:
        return (
            "is a LoRA adapter, not a model: merge it into its base model (in peft:"
            " merge_and_unload, then save_pretrained) and serve the result"
        )
    for name, tool in _QUANTIZED.items():
        if name in names:
            return (
                f"has {name}: its weights were quantized by {tool}. Serve the checkpoint that it"
                " was made from, in bfloat16 or float16"
            )
    if weights:
        return None
    if any(name.endswith(".gguf") for name in names):
        return f"holds GGUF files, {INSTEAD_OF_GGUF}"
    if any(name.endswith(_PICKLED) for name in names):
        return "has no .safetensors file: convert its pickled weights"
    return None


INSTEAD_OF_GGUF = (
    "which are for llama.cpp: serve the repository that they were converted from, which has"
    " config.json and .safetensors files"
)
