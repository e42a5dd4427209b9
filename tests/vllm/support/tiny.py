"""Tiny checkpoints with real weights, and the tokens that transformers generates with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kinds
import torch

PROMPTS = [[5, 17, 101, 42], [7, 300, 9], [499, 3, 250, 128, 64, 32]]
LENGTH = 12


def save(kind: str, folder: Path, *, seed: int, **over: Any) -> Path:
    """A checkpoint of random weights, wide enough that the likeliest token stands out, and norms that aren't one."""
    torch.manual_seed(seed)
    model = _class_of(kind)._from_config(kinds.config_of(kind, **over), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-0.1, 0.1)
    model.save_pretrained(folder)
    return folder


def _class_of(kind: str) -> Any:
    import transformers

    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(kinds.config_of(kind))]


@torch.no_grad()
def tokens(folder: Path) -> list[list[int]]:
    """Greedy tokens for each prompt, each computed from the whole text so far."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(LENGTH):
            text.append(int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
        found.append(text[len(prompt) :])
    return found
