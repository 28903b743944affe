"""The benchmark of the native step, on models that take no time."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from linattn.bench import step
from linattn.bench.__main__ import app
from linattn.models import ImageConfig, ImageModel
from linattn.nn import Layer
from linattn.ops import cpu
from linattn.ops.parts import rounded

pytestmark = pytest.mark.skipif(not cpu.status()[0], reason=cpu.status()[1])
QUICK = step.Effort(budget=0.0, least=1, once=0.0)


def tiny(name="mnist", **changes):
    torch.manual_seed(0)
    layer = Layer(width=32, num_heads=2, **changes)
    return ImageModel(ImageConfig((4, 4, 1), layer, depth=1)).eval()


def test_every_line_and_the_file(monkeypatch, tmp_path):
    monkeypatch.setattr(step, "_model", tiny)
    monkeypatch.setattr(step, "COPIED", 1000)
    monkeypatch.setattr(step, "Effort", lambda **_: QUICK)
    run = CliRunner().invoke(app, ["step", "--out", str(tmp_path / "made.json")])
    assert run.exit_code == 0, run.output
    made = json.loads((tmp_path / "made.json").read_text())
    assert [(line["what"], line["batch"]) for line in made["lines"]] == [
        ("operator", 1),
        *((name, batch) for name in ("mnist", "cifar10") for batch in (1, 64)),
        *[("mnist, an image", 1)] * 3,
        ("mnist, images", 64),
    ]
    assert all(seconds > 0 for line in made["lines"] for seconds in line["seconds"].values())
    assert {claim["outcome"] for line in made["lines"] for claim in line["claims"]} <= {"PASS", "MISS"}
    state, speed = tiny().empty_state(1).nbytes, made["copy bytes a second"]
    floors = made["lines"][1]["floors"]
    assert floors["fp32"] * speed > 4 * 32 * 32 * 12 + 2 * state  # the products of a block alone
    assert floors["int8"] * speed < 2 * 32 * 32 * 12 + 2 * state


def test_losses_are_those_of_rounded_weights():
    model, data = tiny(), torch.arange(48).reshape(3, 4, 4, 1)
    made = step.losses(model, data)
    assert made["fp32"] == float(model.bits_per_dim(data)[0].mean())
    assert 0 < abs(made["bf16"] - made["fp32"]) < 0.1 and 0 < abs(made["int8"] - made["fp32"]) < 0.1


def test_rounded_weights():
    weight = torch.tensor([[1.0, -127.0, 0.4], [0.0, 0.0, 0.0]])
    assert rounded(weight, "int8").tolist() == [[1.0, -127.0, 0.0], [0.0, 0.0, 0.0]]
    assert torch.equal(rounded(weight, "fp32"), weight) and rounded(weight, "bf16")[0, 2] == 0.400390625


def test_claims():
    assert step.claim("", 5.0, 5.0)["outcome"] == "PASS" and step.claim("", 4.9, 5.0)["outcome"] == "MISS"
    assert step.claim("", 2.0, 2.0, least=False)["outcome"] == "PASS"
    assert step.claim("", 2.1, 2.0, least=False)["outcome"] == "MISS"
