"""Compares attention and the head of a language model with PyTorch in f64: `python reference.py FOLDER DEVICE`.

FOLDER has the output of the test `gpu::reference` of `zero-ops`: inputs in bf16, results and gradients of the GPU. Prints a line of JSON per tensor with
its error relative to the definition in f64, and the error of PyTorch's own bf16; the exit status is 1 if an error is too large.
"""

import json
import struct
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U32": torch.int32, "I64": torch.int64}
# Tolerance for ‖error‖ over ‖reference‖. A result is rounded once to bf16, with an error of at most 2⁻⁹. So is each
# factor that the kernels keep in bf16: probabilities, gradients of scores, and their inputs. The four errors add up to
# at most 2⁻⁷.
TOLERANCE = 2.0**-7
# Tolerance for a row's error over the sum of its own norm and the mean norm of a row: a single wrong tile exceeds it by
# far, cancellation within a row does not.
ROW_TOLERANCE = 2.0**-4


def load(path, device):
    """Loads the tensors of a safetensors file."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    header, tensors = json.loads(data[8 : 8 + length]), {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in about["data_offsets"])
        flat = torch.frombuffer(data[start:end], dtype=DTYPES[about["dtype"]])
        tensors[name] = flat.reshape(about["shape"]).to(device)
    return tensors


def seen(documents, time, device):
    """The attention mask: [batch or 1, 1, time, time]."""
    causal = torch.ones(time, time, dtype=torch.bool, device=device).tril()[None, None]
    if documents is None:
        return causal
    # A new document begins where the number changes.
    changes = F.pad((documents[:, 1:] != documents[:, :-1]).long(), (1, 0)).cumsum(1)
    return causal & (changes[:, None, :, None] == changes[:, None, None, :])


def attention(case, dtype):
    """Result and gradients, from the definition in f64 or from PyTorch's kernel in bf16."""
    q, k, v = (case[name].to(dtype).detach().requires_grad_() for name in "qkv")
    mask = seen(case.get("documents"), q.shape[1], q.device)
    # [batch, heads, time, size], keys and values repeated for the query heads that share them.
    wide = [x.transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], 1) for x in (q, k, v)]
    if dtype == torch.float64:
        scores = wide[0] @ wide[1].transpose(2, 3) / q.shape[3] ** 0.5
        mixed = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ wide[2]
    else:
        mixed = F.scaled_dot_product_attention(*wide, attn_mask=mask)
    out = mixed.transpose(1, 2)
    out.backward(case["upstream"].to(dtype))
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def head(case, dtype):
    """Loss and gradients of x·Wᵀ and its cross-entropy."""
    x, weight = (case[name].to(dtype).detach().requires_grad_() for name in ("x", "weight"))
    logits = x @ weight.T
    loss = F.cross_entropy(logits if dtype == torch.float64 else logits.float(), case["targets"].long())
    (loss * case["upstream"].to(loss.dtype)).backward()
    return {"out": loss.detach(), "dx": x.grad, "dweight": weight.grad}


def apart(got, want):
    """‖error‖ over ‖reference‖, for the tensor and for its worst row."""
    got, want = got.double(), want.double()
    if want.dim() == 0:
        relative = float((got - want).abs() / want.abs())
        return relative, relative
    error, norm = (got - want).norm(dim=-1), want.norm(dim=-1)
    mean = norm.square().mean().sqrt()
    return float(error.norm() / norm.norm()), float((error / (norm + mean)).max())


def compared(path, device):
    case = load(path, device)
    definition = head if "targets" in case else attention
    want, peer = definition(case, torch.float64), definition(case, torch.bfloat16)
    for name, reference in want.items():
        error, row = apart(case[name], reference)
        # NaN counts as too large.
        good = error <= TOLERANCE and row <= ROW_TOLERANCE
        shape = list(case["q" if "q" in case else "x"].shape)
        yield good, {
            "case": path.stem, "shape": shape, "tensor": name, "error": error, "row_error": row,
            "torch_error": apart(peer[name], reference)[0], "ok": good,
        }  # fmt: skip


def main():
    folder, device = Path(sys.argv[1]), sys.argv[2]
    torch.backends.cuda.matmul.allow_tf32 = False
    files, good = sorted(folder.glob("*.safetensors")), True
    for path in files:
        for fine, line in compared(path, device):
            good &= fine
            print(json.dumps(line), flush=True)
    if not files or not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
