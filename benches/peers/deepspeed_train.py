"""Trains with DeepSpeed at `--stage` 0, 1, 2 or 3, with its defaults and without offload."""

import deepspeed

import instruction_sets
from gpt import build
from presets import ADAMW, CLIP, PRESETS
from trainer import arguments, memory, rendezvous, run

parser = arguments()
parser.add_argument("--stage", type=int, choices=range(4), required=True)
chosen = parser.parse_args()
imported = memory()
rendezvous()
instruction_sets.hold_deepspeed()
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
preset = PRESETS[chosen.preset]
model = build(preset)
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": preset.micro_batch,
        "gradient_accumulation_steps": chosen.accumulation,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": chosen.stage},
        "bf16": {"enabled": chosen.dtype == "bf16"},
        "steps_per_print": 1_000_000,
    },
)


def micro_step(tokens, targets, _is_last):
    loss = engine(tokens, targets)
    engine.backward(loss)
    # DeepSpeed counts micro-batches itself, and updates after the last one.
    engine.step()
    return loss


run(chosen, imported, micro_step, lambda: None)
