"""Bits/dim counted by two codes that share nothing but the weights, and the command that lays them side by side."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from test_cli import call

from linattn.models import ImageModel, build, preset, save
from linattn.models.files import load
from linattn.train.recount import recount

SMALL = {"shape": (3, 4, 2), "width": 16, "num_heads": 2, "depth": 2}
BEST = {"norm_first": True, "activation": "gelu", "position": "row_column_channel", "head": "categorical"}
MODELS = {
    "paper": {},
    "best": BEST,
    "softmax": {"attention": "softmax"},
    "swiglu": {"activation": "swiglu", "norm": "rms", "bias": False, "position": "sine_add"},
}


def drawn(**changes) -> ImageModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build(preset("mnist", **{**SMALL, **changes})).eval()
        assert isinstance(model, ImageModel)
        for name, w in model.named_parameters():  # away from 0 and 1, where a wrong norm or bias would not show
            if w.dim() == 1:
                w.data.normal_(1.0 if "norm" in name and "weight" in name else 0.0, 0.5)
            elif name.startswith("head"):
                w.data.mul_(6)
    return model


def images(count: int = 3) -> torch.Tensor:
    made = torch.randint(256, (count, 3, 4, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    made[0, 0], made[1, 0] = 0, 255  # the two open bins
    return made


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_both_counts_agree(changes):
    model = drawn(**changes)
    exact = model.double().bits_per_dim(images())[0]
    again = recount(model.float(), images())
    assert exact.std() > 0.01
    torch.testing.assert_close(again, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"conv": 4}, {"rotary": "before"}, {"feature_map": "exp"}, {"attention": "reformer"}]
)
def test_what_it_does_not_know(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=rf"here {name} is .*without --check"):
        recount(drawn(**changes), images())


def test_the_command(tmp_path, monkeypatch, capsys):
    """It agrees on a sound model; on one whose parallel form is broken it says so and fails."""
    model = build(preset("digits", width=8, num_heads=2, depth=1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)  # as built, attention says so little that an error of it hardly shows
    save(model, tmp_path / "model.safetensors", {"run": {"data": "digits", "data_options": {}}})
    words = ("eval", str(tmp_path / "model.safetensors"), "--examples", "4", "--check", "4")
    code, said, _ = call(monkeypatch, capsys, *words)
    found = json.loads(said.splitlines()[-1])
    assert code == 0 and found["check"]["agrees"] and abs(found["check"]["bits_again"] - found["bits"]) < 1e-5

    def not_causal(name, device="cpu"):
        loaded: Any = load(name, device)
        for block in loaded.stack.blocks:
            block.attention.causal = False
        return loaded

    monkeypatch.setattr("linattn.cli.judging.load_model", lambda name, _: not_causal(name))
    code, said, _ = call(monkeypatch, capsys, *words)
    assert code == 1 and "DIFFER" in said and not json.loads(said.splitlines()[-1])["check"]["agrees"]


def test_only_images_are_counted_again(tmp_path, monkeypatch, capsys):
    save(build(preset("text", width=8, num_heads=2, depth=1)), tmp_path / "text.safetensors")
    (tmp_path / "notes").write_bytes(bytes(range(97, 122)) * 40)
    words = ("eval", str(tmp_path / "text.safetensors"), "--data", str(tmp_path / "notes"), "--window", "8")
    code, _, said = call(monkeypatch, capsys, *words, "--check", "3")
    assert code == 1 and "--check counts images again" in said
