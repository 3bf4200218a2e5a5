"""Sizes of the models that are trained here. Needs no PyTorch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int
    micro_batch: int


PRESETS = {
    "10m": Preset(layers=6, width=384, heads=6, length=256, vocabulary=256, micro_batch=4),
    "124m": Preset(layers=12, width=768, heads=12, length=256, vocabulary=50257, micro_batch=1),
}
ON_GPU = {
    "tiny": Preset(layers=2, width=64, heads=2, length=64, vocabulary=256, micro_batch=2),
    "10m": PRESETS["10m"],
    "124m": Preset(layers=12, width=768, heads=12, length=1024, vocabulary=50257, micro_batch=8),
    "350m": Preset(layers=24, width=1024, heads=16, length=1024, vocabulary=50257, micro_batch=8),
    "1.5b": Preset(layers=48, width=1600, heads=25, length=1024, vocabulary=50257, micro_batch=4),
}
# Hyperparameters of the optimizer for every trainer; zero-train's configuration has the same values.
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CLIP = 1.0
# On a GPU: the largest relative difference between losses of two trainers, and how many steps are compared.
AGREEMENT, COMPARED = 3e-3, 8


def model(preset):
    """The `model` section of zero-train's configuration."""
    return {
        "type": "gpt2",
        "vocab_size": preset.vocabulary,
        "n_positions": preset.length,
        "n_embd": preset.width,
        "n_layer": preset.layers,
        "n_head": preset.heads,
    }


def configuration(preset, tokens, start, device, dtype="bf16"):
    """zero-train's configuration of a model on one device; without `start` it initializes its own weights."""
    training = {"weight_decay_on": "all", "device": device}
    if start:
        training["initial_weights"] = str(start)
    return {
        "train_micro_batch_size_per_gpu": preset.micro_batch,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": 0},
        "model": model(preset),
        "data": {"train": str(tokens), "format": "tokens", "shuffle": False},
        "training": training,
        "launcher": {"num_processes": 1},
    }
