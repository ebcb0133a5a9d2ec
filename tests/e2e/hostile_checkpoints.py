"""Checkpoints that must not be served: seeded mutations of a good one, and what catalogues name.

Every case is an entry for `POST /admin/models`. Most must be refused; some mutations are harmless,
and the model then has to answer like any other.
"""

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

from c2cserve.engine.models.config import parse_config
from c2cserve.engine.models.layout import plan_layout

Files = dict[str, Any]
"""Name -> content of a checkpoint's file: an object for JSON, bytes, or what makes the file."""
Case = tuple[str, dict[str, Any]]

WRONG_VALUES: list[Any] = [
    None, -1, 0, 1, 10**9, 2**31, 2**63, 10**30, 10**5000, 1e308, 1e400, -1e400, math.nan, 2.5, "x",
    "", "\ud800", "\0", "A" * 100_000, [], {}, [None], [[]], [1] * 5000, {"a": {"b": [1]}}, True,
    False, "llama3", ["LlamaForCausalLM"], 5, {"rope_type": "yarn"},
]  # fmt: skip
CONFIG_KEYS = (
    "architectures", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps",
    "rope_parameters", "rope_theta", "rope_scaling", "hidden_act", "quantization_config",
    "partial_rotary_factor", "attention_bias", "mlp_bias", "tie_word_embeddings", "sliding_window",
    "use_sliding_window", "layer_types", "max_window_layers", "eos_token_id", "dtype",
    "torch_dtype", "some_unknown_key", "original_max_position_embeddings",
)  # fmt: skip
ROPES: list[Any] = [
    {"rope_type": kind, "rope_theta": theta, **more}
    for kind, theta, more in (
        ("linear", 1e4, {"factor": 0}), ("linear", 1e4, {"factor": "x"}),
        ("linear", 1e4, {"factor": math.nan}), ("dynamic", 1e4, {"factor": -1}),
        ("dynamic", 1e4, {"factor": 1e300}), ("default", 0, {}), ("default", -5.0, {}),
        ("default", 1.0, {}), ("default", 1e300, {}), ("default", math.inf, {}),
        ("yarn", 1.0, {"factor": 4.0}), ("yarn", 1e4, {"factor": 0.0}),
        ("yarn", 1e4, {"factor": 4.0, "original_max_position_embeddings": 0}),
        ("yarn", 1e4, {"factor": 4.0, "beta_fast": -1}),
        ("yarn", 1e4, {"factor": 4.0, "mscale": [1], "mscale_all_dim": {}}),
        ("llama3", 1e4, {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}),
        ("llama3", 1e4, {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}),
        ("llama3", 1e4, {"factor": [], "low_freq_factor": {}, "high_freq_factor": "x"}),
        ("longrope", 1e4, {"long_factor": [0.0] * 16, "short_factor": [0.0] * 16}),
        ("longrope", 1e4, {"long_factor": ["x"] * 16, "short_factor": [None] * 16}),
        ("longrope", 1e4, {"long_factor": 5, "short_factor": 5}),
        ("su" * 50_000, 1e4, {}), ([], 1e4, {}), ({"a": 1}, [], {}),
    )
]  # fmt: skip
TEMPLATES: list[Any] = [
    "{{", "{% for x in %}", "{{ 9**(9**9) }}", "{{ 'x' * 10**12 }}", "{{ 'x'|center(10**10) }}",
    "{{ messages[99].nothing.more }}",
    "{% if " + "(" * 5000 + "1" + ")" * 5000 + " %}{% endif %}", {"a": 1}, [1, 2], [{"name": "d"}],
    [{"name": [], "template": "x"}], 7, "{{ ''.__class__.__mro__ }}", "{% include 'x' %}",
]  # fmt: skip


def deep(levels: int, kind: str = "[") -> bytes:
    """JSON that many levels deep."""
    opening, closing = ("[", "]") if kind == "[" else ('{"a":', "}")
    return (opening * levels + "1" + closing * levels).encode()


class Generator:
    """Writes cases under `directory`, from the good checkpoint `base`."""

    def __init__(self, directory: Path, base: Path, seed: int) -> None:
        self._directory = directory
        self._base = base
        self._random = Random(seed)
        self._count = 0
        self._config: dict[str, Any] = json.loads((base / "config.json").read_text())
        self._tokenizer: dict[str, Any] = json.loads((base / "tokenizer.json").read_text())
        data = (base / "model.safetensors").read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        self._header: dict[str, Any] = json.loads(data[8:begin])
        self._data = data[begin:]

    def cases(self) -> Iterator[Case]:
        yield from self._configs()
        yield from self._tokenizers()
        yield from self._weights()
        yield from self._shapes()
        yield from self._entries()

    def _case(self, what: str, files: Files, **entry: Any) -> Case:
        """The base checkpoint with these files instead of its own; None removes one."""
        self._count += 1
        name = f"hostile-{self._count}"
        directory = self._directory / name
        shutil.copytree(self._base, directory)
        for file, content in files.items():
            path = directory / file
            path.unlink(missing_ok=True)
            if callable(content):
                content(path)
            elif isinstance(content, bytes):
                path.write_bytes(content)
            elif content is not None:
                path.write_text(json.dumps(content))
        return what, {"id": name, "path": str(directory), **entry}

    def _odd_files(self, file: str) -> Iterator[Case]:
        """Things that are no JSON object, or no file, where one is expected."""
        contents: dict[str, bytes | Callable[[Path], object]] = {
            "empty": b"", "not JSON": b"{nonsense", "a list": b"[1, 2]", "a number": b"17",
            "null": b"null", "deep": deep(100_000), "deep objects": deep(900, "{"),
            "a byte order mark": b"\xef\xbb\xbf{}", "not UTF-8": b'{"a": "\xff\xfe"}',
            "zeros": bytes(1000), "UTF-16": "{}".encode("utf-16"), "an empty object": b"{}",
            "a directory": Path.mkdir, "a pipe": os.mkfifo,
            "a link to itself": lambda path: path.symlink_to(path),
            "a link to nothing": lambda path: path.symlink_to("nowhere"),
            "a device": lambda path: path.symlink_to("/dev/zero"),
            "endless": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
        }  # fmt: skip
        for what, content in contents.items():
            yield self._case(f"{file} is {what}", {file: content})

    # ---- configs --------------------------------------------------------------------------------

    def _configs(self) -> Iterator[Case]:
        yield from self._odd_files("config.json")
        yield from self._odd_files("generation_config.json")
        for key in CONFIG_KEYS:
            for value in self._random.sample(WRONG_VALUES, 2):
                yield self._case(
                    f"{key} = {str(value)[:40]!r}" if not isinstance(value, int) else f"{key} int",
                    {"config.json": _encode({**self._config, key: value})},
                )
        for rope in ROPES:
            config = {**self._config, "rope_parameters": rope}
            yield self._case(f"rope {str(rope)[:60]}", {"config.json": _encode(config)})
        for size in (10**9, 2**31, 10**30):
            huge = {**self._config, "num_hidden_layers": size}
            yield self._case(f"{size} layers", {"config.json": _encode(huge)})
            moe = {
                **self._config, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": size,
                "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 3,
            }  # fmt: skip
            yield self._case(f"{size} experts", {"config.json": _encode(moe)})

    # ---- tokenizers -----------------------------------------------------------------------------

    def _tokenizers(self) -> Iterator[Case]:
        yield from self._odd_files("tokenizer.json")
        yield from self._odd_files("tokenizer_config.json")
        for token in (263, 2**20, 2**31, 2**32 - 1, 2**32, -1):
            yield self._case(f"adds token id {token}", {"tokenizer.json": self._adding(token)})
        for name, value in (
            ("padding", {"strategy": {"Fixed": 10**12}, "direction": "Right",
                         "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                         "pad_token": "x"}),
            ("truncation", {"direction": "Right", "max_length": 0, "strategy": "LongestFirst",
                            "stride": 0}),
            ("truncation", {"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
                            "stride": 5}),
            ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
            ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(x+x+)+y("},
                               "behavior": "Isolated", "invert": False}),
        ):  # fmt: skip
            changed = {**self._tokenizer, name: value}
            yield self._case(f"{name} {str(value)[:60]}", {"tokenizer.json": changed})
        for template in TEMPLATES:
            config = {"chat_template": template}
            files: Files = {"tokenizer_config.json": config, "chat_template.jinja": None}
            yield self._case(f"template {str(template)[:40]!r}", files)
        yield self._case("template is not UTF-8", {"chat_template.jinja": b"\xff\xfe{{ x }}"})
        yield self._case("template is a directory", {"chat_template.jinja": Path.mkdir})
        for number in range(30):
            mutated = deepcopy(self._tokenizer)
            for _ in range(self._random.randint(1, 3)):
                self._mutate(mutated)
            yield self._case(f"mutated tokenizer {number}", {"tokenizer.json": _encode(mutated)})

    def _adding(self, token: int) -> bytes:
        """The tokenizer, with a post-processor that puts this id in front."""
        special = {"id": "<odd>", "ids": [token], "tokens": ["<odd>"]}
        piece = {"SpecialToken": {"id": "<odd>", "type_id": 0}}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        pair = {"Sequence": {"id": "B", "type_id": 1}}
        processor = {
            "type": "TemplateProcessing", "single": [piece, text], "pair": [piece, text, pair],
            "special_tokens": {"<odd>": special},
        }  # fmt: skip
        return _encode({**self._tokenizer, "post_processor": processor})

    def _mutate(self, node: Any) -> None:
        """Change one value somewhere."""
        while True:
            keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                return
            key = self._random.choice(keys)
            if isinstance(node[key], dict | list) and node[key] and self._random.random() < 0.8:
                node = node[key]
                continue
            if isinstance(node, dict) and self._random.random() < 0.3:
                del node[key]
            else:
                node[key] = deepcopy(self._random.choice(WRONG_VALUES))
            return

    # ---- weights --------------------------------------------------------------------------------

    def _weights(self) -> Iterator[Case]:
        yield from self._odd_files("model.safetensors")
        yield from self._odd_files("model.safetensors.index.json")
        weight_maps: list[Any] = [
            [], {}, None, {"a": 3}, {"a": []}, {"a": "../../etc/passwd"}, {"a": "/etc/passwd"},
            {"a": "x\0y.safetensors"}, {"a": "x" * 5000}, {"a": ""}, {"a": "."}, {"a": ".."},
            {"a": "\ud800"}, {"a": "config.json"}, {"a": "nowhere.safetensors"},
            {f"t{i}": f"{i}.safetensors" for i in range(20_000)},
        ]  # fmt: skip
        for weight_map in weight_maps:
            index = _encode({"weight_map": weight_map})
            yield self._case(
                f"index {str(weight_map)[:60]!r}", {"model.safetensors.index.json": index}
            )
        names = sorted(self._header)
        for number, change in enumerate(self._header_changes()):
            header = deepcopy(self._header)
            change(header, next(name for name in names if name != "__metadata__"))
            yield self._case(f"header change {number}", {"model.safetensors": self._file(header)})
        whole = self._file(self._header)
        begin = len(whole) - len(self._data)
        for length in (0, 1, 2**31, 2**63, 2**64 - 1):
            data = struct.pack("<Q", length) + whole[8:]
            yield self._case(f"header of {length} bytes", {"model.safetensors": data})
        for share in (0.01, 0.5, 0.999):
            data = whole[: int(len(whole) * share)]
            yield self._case(f"the first {share} of the file", {"model.safetensors": data})
        for number in range(15):
            damaged = bytearray(whole)
            for _ in range(self._random.randint(1, 20)):
                damaged[self._random.randrange(begin)] = self._random.randrange(256)
            yield self._case(f"damaged header {number}", {"model.safetensors": bytes(damaged)})
        for what, pattern in (("NaN", b"\xc0\x7f"), ("inf", b"\x80\x7f"), ("zeros", b"\0\0")):
            data = whole[:begin] + pattern * (len(self._data) // 2)
            yield self._case(f"weights of {what}", {"model.safetensors": data})

    def _header_changes(self) -> Iterator[Callable[[dict[str, Any], str], object]]:
        """Of one tensor's entry."""
        wrong: list[tuple[str, Any]] = [
            ("data_offsets", [-4, 0]), ("data_offsets", [0, 2**63]), ("data_offsets", [0]),
            ("data_offsets", [8, 4]), ("data_offsets", "ab"), ("data_offsets", [0.5, 1.5]),
            ("data_offsets", [True, False]), ("data_offsets", None),
            ("data_offsets", [0, 10**4000]),
            ("shape", [2**40, 2**40]), ("shape", [-1, -1]), ("shape", [10**4000, 10**4000]),
            ("shape", []), ("shape", [1] * 1000), ("shape", {"a": 1}), ("shape", "ab"),
            ("shape", [0]), ("dtype", "F99"), ("dtype", None), ("dtype", ["F32"]),
            ("dtype", "I64"), ("dtype", "A" * 100_000),
        ]  # fmt: skip
        for field, value in wrong:
            yield lambda header, name, f=field, v=value: header[name].update({f: v})
        yield lambda header, name: header.update({name: 5})
        yield lambda header, name: header.pop(name)
        yield lambda header, name: header.update({"\n\x1b[2Jodd\0": header.pop(name)})
        yield lambda header, name: header.update({"extra": dict(header[name])})
        yield lambda header, name: header.update({"x" * 1_000_000: dict(header[name])})

    def _file(self, header: dict[str, Any]) -> bytes:
        text = _encode(header)
        return struct.pack("<Q", len(text)) + text + self._data

    # ---- shapes that are never trained ----------------------------------------------------------

    def _shapes(self) -> Iterator[Case]:
        """Weights that do match their config."""
        small = {
            "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 8,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
            "intermediate_size": 8, "vocab_size": 263, "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5, "dtype": "bfloat16",
        }  # fmt: skip
        changes: list[dict[str, Any]] = [
            {}, {"hidden_size": 1}, {"head_dim": 2}, {"hidden_size": 3, "intermediate_size": 1},
            {"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 512},
            {"num_attention_heads": 8192, "num_key_value_heads": 8192, "hidden_size": 1},
            {"num_attention_heads": 8192, "num_key_value_heads": 8192, "hidden_size": 1,
             "head_dim": 512},
            {"max_position_embeddings": 1}, {"max_position_embeddings": 2**30},
            {"vocab_size": 1}, {"vocab_size": 262}, {"eos_token_id": list(range(263))},
            {"rope_parameters": {"rope_type": "dynamic", "factor": 1e6, "rope_theta": 1e15}},
            {"rope_parameters": {"rope_type": "yarn", "factor": 1e-6, "rope_theta": 1.0001}},
            {"num_hidden_layers": 200}, {"rms_norm_eps": 0.0}, {"dtype": "float16"},
        ]  # fmt: skip
        for change in changes:
            config = {**small, **change}
            files: Files = {"config.json": config, "model.safetensors": self._random_file(config)}
            yield self._case(f"shape {str(change)[:70]}", files)

    def _random_file(self, config: dict[str, Any]) -> bytes:
        header: dict[str, Any] = {}
        end = 0
        for group in plan_layout(parse_config(config)).groups:
            for part in group.parts:
                begin, end = end, end + 2 * math.prod(part.shape)
                header[part.source] = {
                    "dtype": "BF16", "shape": part.shape, "data_offsets": [begin, end],
                }  # fmt: skip
        text = _encode(header)
        data = bytes(byte & 0x3F if i % 2 else byte for i, byte in enumerate(
            self._random.randbytes(min(end, 1 << 16))))  # fmt: skip
        return struct.pack("<Q", len(text)) + text + (data * (end // max(1, len(data)) + 1))[:end]

    # ---- entries --------------------------------------------------------------------------------

    def _entries(self) -> Iterator[Case]:
        """Of a good checkpoint."""
        good = str(self._base)
        loop = self._directory / "loop"
        loop.symlink_to(loop)
        for path in (
            "", "\0", good + "\0", "x" * 5000, "/" + "y/" * 3000, "~nobody-of-that-name/x",
            "/dev/zero", "/proc/self/mem", str(loop), str(loop / "inner"),
            good + "/config.json", "\ud800", 5,
            None, [], {}, "\n", "/",
        ):  # fmt: skip
            yield f"path {str(path)[:30]!r}", {"id": "entry", "path": path}
        for key, value in (
            ("priority", 10**30), ("priority", -(2**63)), ("max_context", 10**30),
            ("max_context", 0), ("ttft_s", 1e308), ("ttft_s", 0), ("tpot_s", -1),
            ("keep_warm_s", 1e308), ("aliases", ["a"] * 10), ("aliases", ["x#2"]),
            ("aliases", ["\0"]), ("aliases", [[]]), ("dtype", "int8"), ("dtype", []),
            ("pinned", "yes"), ("hub", "a/b"), ("revision", "main"), ("x" * 10_000, 1),
        ):  # fmt: skip
            yield f"{key[:20]} {str(value)[:30]}", {"id": "entry", "path": good, key: value}
        for name in ("", "#", "entry#2", "a b", "\n", "x" * 201, "../x", 5, None, [], "\ud800"):
            yield f"id {str(name)[:20]!r}", {"id": name, "path": good}


def _encode(value: object) -> bytes:
    """JSON with the literal that Python refuses to write at that length."""
    import sys

    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value).encode()
    finally:
        sys.set_int_max_str_digits(before)
