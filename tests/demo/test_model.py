"""The decoder's logits are those of transformers, weight for weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from refit_sdk.demo.checkpoint import open_checkpoint
from refit_sdk.demo.config import SIZES
from refit_sdk.demo.model import make_decoder
from refit_sdk.demo.train import fill, seeded_values, stored_values


def test_logits_are_those_of_transformers(arch: str, save: Any, tmp_path: Path) -> None:
    reference = save(arch, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    decoder = make_decoder(checkpoint.config)
    decoder.to_empty(device="cpu")
    decoder.tie()
    fill(decoder, stored_values(checkpoint))
    tokens = torch.randint(checkpoint.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens), reference(tokens).logits, rtol=1e-5, atol=1e-5)


def test_names_and_shapes_are_those_of_transformers(arch: str, save: Any, tmp_path: Path) -> None:
    reference = save(arch, tmp_path)
    config = open_checkpoint(tmp_path).config
    ours = {name: tuple(p.shape) for name, p in make_decoder(config).named_parameters()}
    assert ours == {name: tuple(p.shape) for name, p in reference.named_parameters()}
    assert ours == config.parameter_shapes()


def test_a_size_is_what_its_config_says() -> None:
    for config in SIZES.values():
        assert sum(p.numel() for p in make_decoder(config).parameters()) == config.num_parameters


def test_first_values_depend_on_seed_and_name_only() -> None:
    one, same, other = seeded_values(1), seeded_values(1), seeded_values(2)
    assert torch.equal(one("a.weight", (4, 8)), same("a.weight", (4, 8)))
    assert not torch.equal(one("a.weight", (4, 8)), one("b.weight", (4, 8)))
    assert not torch.equal(one("a.weight", (4, 8)), other("a.weight", (4, 8)))
