"""`zero-train` configurations for the steps: those of benches/peers, and others of the same form."""

import json
import sys
from dataclasses import replace
from pathlib import Path

PEERS = Path(__file__).resolve().parents[2] / "benches" / "peers"
sys.path.insert(0, str(PEERS))

import corpus  # noqa: E402
from presets import ON_GPU, configuration  # noqa: E402


def preset(name, mock, **changes):
    """A model of benches/peers; the emulated GPU always gets the smallest one."""
    return replace(ON_GPU["tiny" if mock else name], **changes)


def tokens(vocabulary, folder):
    """The token file, which is written if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tokens-{vocabulary}.u16.bin"
    if not path.exists():
        corpus.write(vocabulary, path)
    return path


def gpt2(of, folder, start=None, **more):
    """A run of GPT-2 in bf16 on a GPU; `more` adds sections, or keys of sections."""
    return joined(configuration(of, tokens(of.vocabulary, folder), start, "cuda"), more)


def llama_1b(folder, mock):
    """Llama 3.2 1B with rows of 2,048 tokens, 8,192 tokens per step."""
    sizes = {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048,
    }  # fmt: skip
    if mock:
        sizes = {
            "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        }  # fmt: skip
    config = gpt2(preset("124m", mock), folder, train_micro_batch_size_per_gpu=2 if mock else 4)
    return config | {"model": {"type": "llama", "tie_word_embeddings": True, **sizes}}


def joined(config, more):
    for key, value in more.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def written(config, path):
    """Writes the configuration to a file, as JSON, which is valid YAML."""
    path.write_text(json.dumps(config))
    return path
