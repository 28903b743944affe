"""Weights in few bytes, and checkpoints that can be carried: what comes back, how near it is, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from test_checkpoint import part
from train_cases import lines_of, tiny

from linattn.models import build, load, preset, save
from linattn.models.files import SHIPPED, TO_SHIP, record_of, shipped
from linattn.models.packed import SCALE, SMALL, packed, unpacked
from linattn.train import checkpoint, portable, train

MOST_MB = 40  # of all weights that ship


def test_rows_are_rounded_to_half_a_step():
    rows = torch.randn(512, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 512)[:, None]
    rows[3] = 0
    tensors = {"w": rows, "small": rows[:2], "vector": rows[0], "count": torch.arange(3)}
    small = packed(tensors, "int8")
    assert small["w"].dtype == torch.int8 and small[SCALE + "w"].shape == (512, 1)
    back = unpacked(small)
    assert back.keys() == tensors.keys()
    off = (back["w"] - rows).abs().amax(1)
    assert (off <= rows.abs().amax(1) / 127 * 0.501).all() and off[4] > 0 and not back["w"][3].any()
    assert all(back[name].equal(tensors[name]) for name in ("small", "vector", "count"))
    assert rows[:2].numel() < SMALL
    half = packed(tensors, "bf16")
    assert half["w"].dtype == torch.bfloat16 and unpacked(half)["w"].equal(rows.bfloat16().float())
    with pytest.raises(ValueError, match="int8 or bf16, got 'int4'"):
        packed(tensors, "int4")


@pytest.mark.parametrize("form", ["int8", "bf16"])
def test_a_packed_model_is_used_like_any_other(tmp_path, form):
    model = build(preset("digits", depth=1), generator=torch.Generator().manual_seed(0)).eval()
    save(model, tmp_path / "whole.safetensors", {"step": 3})
    save(model, tmp_path / "small.safetensors", {"step": 3}, form=form)
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("whole", "small")]
    assert sizes[1] < sizes[0] * (0.35 if form == "int8" else 0.55)
    loaded = load(tmp_path / "small.safetensors")
    assert {x.dtype for x in loaded.parameters()} == {torch.float32}
    assert record_of(tmp_path / "small.safetensors") == {"step": 3}
    images = torch.randint(256, (2, 8, 8, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    exact, near = model.bits_per_dim(images)[0], loaded.bits_per_dim(images)[0]  # type: ignore[union-attr]
    assert 0 < (exact - near).abs().max() < 0.05


def test_what_ships_is_small_and_has_a_card():
    sizes = {name: (SHIPPED / f"{name}.safetensors").stat().st_size for name in shipped()}
    assert sum(sizes.values()) <= MOST_MB * 1e6, sizes
    for name in shipped():
        card, record = (SHIPPED / f"{name}.md").read_text(), record_of(name)
        assert all(word in card for word in ("before rounding", "after rounding", "licence", f"linattn eval {name}"))
        assert record["packed"]["after"]["examples"] > 0 and record["data"]["licence"] in card


@pytest.mark.parametrize("name", TO_SHIP)
def test_a_name_without_weights_says_what_to_do(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("linattn.models.files.SHIPPED", tmp_path)
    with pytest.raises(ValueError, match=rf"no weights of '{name}' ship .*`linattn train {name}`.*runs/{name}-1"):
        load(name)


def test_a_shipped_name_wins_over_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("linattn.models.files.SHIPPED", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    (tmp_path / "digits").mkdir()
    model = build(preset("digits", width=8, num_heads=2, depth=1))
    save(model, tmp_path / "shipped" / "digits.safetensors")
    assert load("digits").num_parameters == model.num_parameters
    with pytest.raises(ValueError, match=r"is a folder without weights"):
        load("./digits")


# Runs whose tensors are large enough to be rounded.
WIDE = tiny(changes={"width": 48, "num_heads": 2, "depth": 2}, steps=24, checkpoint_every=12, eval_every=12, lr=3e-3)


@pytest.fixture(
    scope="module", params=[{"optimizer": "adamw", "ema": 0.9}, {"optimizer": "radam"}], ids=["ema", "radam"]
)
def halved(request, tmp_path_factory):
    """A run of 24 steps, and the same as it stood after 12."""
    folder = tmp_path_factory.mktemp("halved")
    run = tiny(**{**vars(WIDE), **request.param})
    train(run, folder / "whole", quiet=True)
    part(run, folder / "half", 12)
    return folder


def test_a_run_goes_on_from_packed_files(halved, tmp_path):
    """Measured: 2e-5 nats apart at most, of losses that differ by 0.1 to 0.4 between two log lines."""
    files = portable.pack(halved / "half", tmp_path / "stick")
    exact = (halved / "half" / "checkpoint-00000012.safetensors").stat().st_size
    assert sum(path.stat().st_size for path in files) < 0.55 * exact
    assert train(None, tmp_path / "stick", resume=True, quiet=True).step == 24
    whole, near = ([x["nats"] for x in lines_of(f, "train")] for f in (halved / "whole", tmp_path / "stick"))
    apart = max(abs(a - b) for a, b in zip(whole[6:], near[6:], strict=True))
    assert whole[:6] == near[:6] and 0 < apart < 2e-4, apart
    places = [[x["epoch"] for x in lines_of(f, "train")] for f in (halved / "whole", tmp_path / "stick")]
    assert places[0] == places[1]


def test_every_tensor_comes_back_near(halved):
    kept = checkpoint.read(halved / "half" / "checkpoint-00000012.safetensors").tensors
    back = portable.widened(portable.narrowed(kept))
    assert back.keys() == kept.keys()
    rounded = 0
    for name, x in kept.items():
        assert back[name].shape == x.shape and back[name].dtype == x.dtype
        if back[name].equal(x):
            continue
        rounded += 1
        if name.endswith("_sq"):
            seen = x > 1e-25
            torch.testing.assert_close(back[name][seen], x[seen], rtol=0.15, atol=0)
        elif name.endswith("exp_avg"):
            v = kept[f"{name}_sq"].clamp_min(portable.TINY).sqrt()
            assert (back[name] / v - x / v).abs().max() < 0.5
        else:
            assert (back[name] - x).abs().max() < 1e-3 * x.abs().max()
    assert rounded > 8


@pytest.fixture
def stick(halved, tmp_path, monkeypatch):
    monkeypatch.setattr(portable, "SHARD", 40_000)
    assert len(portable.pack(halved / "half", tmp_path / "stick")) > 2
    return tmp_path / "stick"


def test_pieces_that_are_missing_damaged_or_mixed(stick, halved, tmp_path):
    files = portable.shards(stick)
    second = files[1].read_bytes()
    files[1].unlink()
    with pytest.raises(ValueError, match=rf"lacks {files[1].name}: copy all {len(files)} files"):
        train(None, stick, resume=True, quiet=True)
    for end in (0, 100, len(second) - 1):
        files[1].write_bytes(second[:end])
        with pytest.raises(ValueError, match=rf"{files[1].name} is damaged, cut off"):
            train(None, stick, resume=True, quiet=True)
    files[1].write_bytes(second[:-7] + bytes([second[-7] ^ 1]) + second[-6:])
    with pytest.raises(ValueError, match=rf"{files[1].name} is damaged: its contents"):
        portable.unpack(stick)
    other = portable.pack(halved / "whole", tmp_path / "other")
    shutil.copy(other[1], files[1])
    with pytest.raises(ValueError, match=r"belongs to another checkpoint than .*portable-1-of"):
        portable.unpack(stick)
    assert not (stick / "run.json").exists() and not checkpoint.found(stick)
    files[1].write_bytes(second)
    assert portable.unpack(stick) and not portable.unpack(stick)


def test_packing_again_leaves_no_old_pieces(stick, halved, monkeypatch):
    monkeypatch.setattr(portable, "SHARD", 10**6)
    files = portable.pack(halved / "half", stick)
    assert portable.shards(stick) == files


def test_the_best_weights_are_counted_anew(halved, tmp_path):
    """They are not carried, so that the next evaluation must save some."""
    shutil.copytree(halved / "half", tmp_path / "best")
    form = json.loads((tmp_path / "best" / "run.json").read_text())
    form["run"]["keep"] = "best"
    (tmp_path / "best" / "run.json").write_text(json.dumps(form))
    portable.pack(tmp_path / "best", tmp_path / "stick")
    portable.unpack(tmp_path / "stick")
    made, _ = checkpoint.newest(tmp_path / "stick")
    assert made is not None and made.facts["watch"]["best"] is None


def test_nothing_to_pack(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        portable.pack(tmp_path, tmp_path / "stick")
    train(tiny(steps=1), tmp_path / "run", quiet=True)
    for path in checkpoint.found(tmp_path / "run"):
        path.unlink()
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        portable.pack(tmp_path / "run", tmp_path / "stick")
