"""Records what PyTorch's optimizers do into pytorch.txt, which pytorch.rs compares with. Run with torch 2.15, CPU.

One line a case and step: name, step, then the eight f32 parameters as hexadecimal bits. Start and gradients are exact in
f32: p_i = (i - 3) / 4, g_i(t) = ((7 i + 13 t) mod 17 - 8) / 8 for t = 1, 2, ...
"""

import pathlib
import struct

import torch

CASES = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
    "adam_l2": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, weight_decay=0.1),
    "rmsprop_momentum": lambda p: torch.optim.RMSprop(p, lr=1e-2, alpha=0.9, momentum=0.8, weight_decay=0.1),
    "rmsprop_centered": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.1),
    "nadam_decoupled": lambda p: torch.optim.NAdam(p, lr=1e-2, betas=(0.8, 0.95), momentum_decay=0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2, weight_decay=0.1),
    "radam_decoupled": lambda p: torch.optim.RAdam(p, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1, decoupled_weight_decay=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-10, weight_decay=0.1),
}

lines = []
for name, make in CASES.items():
    p = torch.nn.Parameter(torch.tensor([(i - 3) / 4 for i in range(8)]))
    optimizer = make([p])
    for t in range(1, 51):
        p.grad = torch.tensor([((7 * i + 13 * t) % 17 - 8) / 8 for i in range(8)])
        optimizer.step()
        if t in (1, 2, 3, 10, 30, 50):
            bits = " ".join(struct.pack(">f", x).hex() for x in p.tolist())
            lines.append(f"{name} {t} {bits}\n")
pathlib.Path(__file__).with_suffix(".txt").write_text("".join(lines))
