"""Trains LoRA adapters of every linear map but the head with PEFT, over GPT-2 of transformers, in one process."""

from pathlib import Path

import peft
import torch
import torch.distributed as dist
import transformers

from gpt import build
from presets import ADAMW, CLIP, PRESETS
from trainer import arguments, memory, rendezvous, run
from weights import hugging_face

RANK, ALPHA = 16, 32


def base(preset):
    """GPT-2 with the initial weights of the other trainers."""
    config = transformers.GPT2Config(
        vocab_size=preset.vocabulary, n_positions=preset.length, n_embd=preset.width, n_layer=preset.layers,
        n_head=preset.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, values in build(preset).named_parameters():
            name = hugging_face(name)
            parameters[name].copy_(values.t() if ".c_" in name and name.endswith("weight") else values)
    return model


def write(preset, folder):
    """Writes a new adapter in PEFT's format."""
    torch.manual_seed(5)
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", fan_in_fan_out=True)
    peft.get_peft_model(base(preset), lora).save_pretrained(folder)


def main():
    parser = arguments()
    parser.add_argument("--adapter", type=Path, required=True, help="the adapter to start from")
    chosen = parser.parse_args()
    preset = PRESETS[chosen.preset]
    imported = memory()
    rendezvous()
    dist.init_process_group("gloo")
    model = peft.PeftModel.from_pretrained(base(preset), chosen.adapter, is_trainable=True)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True, **ADAMW)

    def micro_step(tokens, targets, _):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=chosen.dtype == "bf16"):
            logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        (loss / chosen.accumulation).backward()
        return loss

    def finish_step():
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    run(chosen, imported, micro_step, finish_step)


if __name__ == "__main__":
    main()
