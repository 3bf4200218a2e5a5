"""The GPT that every trainer builds, and its initial weights.

Pre-norm GPT-2: learned positions, biases, tanh-GELU, a head tied to the embedding. The weights come from one seeded
generator in the order of the parameters, so that every process starts from the same bits; `weights.py` writes them for
`zero-train`.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

SEED = 1234


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        packed = self.qkv(self.ln_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Maps token ids and next tokens to the mean cross-entropy."""

    def __init__(self, preset):
        super().__init__()
        self.wte = nn.Embedding(preset.vocabulary, preset.width)
        self.wpe = nn.Embedding(preset.length, preset.width)
        self.blocks = nn.ModuleList(Block(preset.width, preset.heads) for _ in range(preset.layers))
        self.ln_f = nn.LayerNorm(preset.width)
        self.head = nn.Linear(preset.width, preset.vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build(preset, device="cpu"):
    """The model with its initial weights: biases 0, norms 1, the rest normal, scaled down at the end of each residual branch.
    Random numbers differ between devices."""
    with torch.device(device):
        model = GPT(preset)
    generator = torch.Generator(device).manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "ln_" in name:
                parameter.fill_(1.0)
            else:
                ends_branch = name.endswith(("proj.weight", "out.weight"))
                deviation = 0.02 / math.sqrt(2 * preset.layers) if ends_branch else 0.02
                parameter.normal_(0.0, deviation, generator=generator)
    return model
