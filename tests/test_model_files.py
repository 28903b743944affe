"""Models on disk: what is read is what was written; what cannot be read is named, with the way out."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from nn_cases import KINDS, layer_of, made, tokens
from safetensors.torch import load_file, save_file

from linattn.models import (
    PRESETS,
    ImageConfig,
    ImageModel,
    LanguageConfig,
    LanguageModel,
    SpeechConfig,
    SpeechModel,
    build,
    files,
    load,
    preset,
    save,
    shipped,
)
from linattn.models.files import from_json, record_of, to_json
from linattn.nn import StackState


def image(**options: Any) -> ImageModel:
    return made(ImageModel, ImageConfig((2, 3, 1), layer_of(**options), 2, position="sine_concat"))


def language(**options: Any) -> LanguageModel:
    return made(LanguageModel, LanguageConfig(layer_of(**options), 2, 11, "position" not in options))


def speech(**options: Any) -> SpeechModel:
    return made(SpeechModel, SpeechConfig(layer_of(**options), 2, num_labels=5, num_features=7))


def some_bytes(time: int = 6, most: int = 11) -> torch.Tensor:
    return torch.randint(most, (2, time), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("config", [*PRESETS.values(), preset("text", map_options={"num_samples": 8}, eps=0.1)])
def test_configs_survive_json(config):
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("make", [image, language, speech])
def test_a_loaded_model_is_the_saved_one(make, name, tmp_path):
    """Bit for bit, with random draws and counts of first values; ready to use, and still trainable."""
    model, x = make(**KINDS[name], dropout=0.1), tokens(2, 6, 7) if make is speech else some_bytes()
    if make is not speech:
        model.first.fit(torch.tensor([3, 3, 5]))
    if name == "after favor":
        model.stack.blocks[0].attention.feature_map.redraw(torch.Generator().manual_seed(9))
    save(model, tmp_path / "model.safetensors")
    random = torch.get_rng_state()
    loaded: Any = load(tmp_path / "model.safetensors")
    assert torch.equal(random, torch.get_rng_state()), "loading draws nothing from the caller's generator"
    assert type(loaded) is type(model) and loaded.config == model.config and not loaded.training
    assert torch.equal(loaded(x)[0], model.eval()(x)[0]) and loaded(x)[0].dtype == torch.float64
    assert all(p.requires_grad for p in loaded.parameters())
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key


@pytest.mark.parametrize("name", KINDS)
def test_going_on_after_saving_model_and_state(name, tmp_path):
    """Another process reads the weights and the state, and goes on as if nothing had happened, bit for bit.

    Which takes tensors that begin where torch's own begin: from elsewhere the last bit of a product can be another.
    """
    model, x = language(**KINDS[name]), some_bytes(20)
    with torch.no_grad():
        _, state = model(x[:, :9], model.empty_state(2), lengths=[9, 4])
        assert state is not None
        save(model, tmp_path / "model.safetensors")
        state.save(tmp_path / "state.safetensors")
        want, _ = model(x[:, 9:], state)
        loaded: Any = load(tmp_path / "model.safetensors")
        resumed = StackState.load(tmp_path / "state.safetensors")
        got, end = loaded(x[:, 9:], resumed)
    assert torch.equal(got, want) and end is not None and end.seen.tolist() == [20, 15]
    assert all(x.data_ptr() % 64 == 0 for x in [*loaded.parameters(), *resumed.tensors().values()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_files_dtype_is_kept(dtype, tmp_path):
    save(language().to(dtype), tmp_path / "model.safetensors")
    assert {p.dtype for p in load(tmp_path / "model.safetensors").parameters()} == {dtype}


def test_a_tied_weight_is_saved_once(tmp_path):
    model = language()
    save(model, tmp_path / "model.safetensors")
    shapes = [tuple(x.shape) for x in load_file(tmp_path / "model.safetensors").values()]
    assert shapes.count((11, 12)) == 1
    loaded: Any = load(tmp_path / "model.safetensors")
    assert loaded.head.weight is loaded.embedding.weight


def test_file_folder_and_name(tmp_path, monkeypatch):
    """Three ways to the same weights; what is not there lists what is."""
    model, run = image(), tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"first is a folder without weights.safetensors"):
        load(run)
    save(model, run / "weights.safetensors", record={"steps": 7, "bits": 3.5})
    for other in ("a", "model", "zz"):
        save(language(), run / f"{other}.safetensors")
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "shipped")
    with pytest.raises(ValueError, match=r"'tiny'; shipped models: none yet"):
        load("tiny")
    (tmp_path / "shipped").mkdir()
    save(model, tmp_path / "shipped" / "tiny.safetensors")
    save(model, tmp_path / "shipped" / "other.safetensors")
    assert shipped() == ["other", "tiny"]
    x = some_bytes()
    for name in (run, str(run), run / "weights.safetensors", "tiny"):
        assert torch.equal(load(name)(x)[0], model(x)[0])
    with pytest.raises(ValueError, match=r"no file, run folder or shipped model 'tinny'; shipped models: other, tiny"):
        load("tinny")
    assert record_of(run) == {"steps": 7, "bits": 3.5} and record_of("tiny") == {}


def test_damaged_and_foreign_files(tmp_path):
    """Cut anywhere, with another's content or none, a file is refused by its name; nothing is ever unpickled."""
    path = tmp_path / "model.safetensors"
    save(language(), path)
    whole = path.read_bytes()
    for end in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"model.safetensors cannot be read as safetensors, it may be damaged"):
            load(path)
        with pytest.raises(ValueError, match="may be damaged"):
            record_of(path)
    torch.save({"weight": torch.ones(3)}, path)
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        load(path)
    save_file({"weight": torch.ones(3)}, path)
    with pytest.raises(ValueError, match="holds no linattn model"):
        load(path)
    language().empty_state(1).save(path)
    with pytest.raises(ValueError, match="holds no linattn model"):
        load(path)


def test_weights_and_config_must_fit(tmp_path):
    """The weights of one model under the config of another; a weight too few; an entry that is not JSON."""
    path = tmp_path / "model.safetensors"
    save(language(), path)
    tensors = load_file(path)
    config = json.dumps(to_json(language().config))
    wider = json.dumps(to_json(language(width=16).config))
    fewer = {name: x for name, x in tensors.items() if name != "stack.norm.weight"}
    for match, weights, entry in (
        ("do not fit their own config.*size mismatch", tensors, wider),
        ("do not fit their own config.*stack.norm.weight", fewer, config),
        ("metadata of .*model.safetensors is not JSON", tensors, config[:-1]),
        ("unknown kind of model None", tensors, "[]"),
    ):
        save_file(weights, path, metadata={"linattn_model": entry})
        with pytest.raises(ValueError, match=f"(?s){match}"):
            load(path)


def test_nothing_is_left_of_a_failed_save(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save(language(), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save(image(), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_others_may_read_what_they_may_read_of_any_file(tmp_path):
    """Temporary files of Python's are their owner's alone, and so were the models that had been written to them."""
    (tmp_path / "plain").write_text("")
    save(language(), tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_configs_that_do_not_describe_a_model(unchecked):
    good = to_json(language().config)
    layer = good["layer"]
    for match, form in {
        "unknown kind of model 'AudioModel'; known: ImageConfig, Lang": good | {"kind": "AudioModel"},
        "LanguageConfig has no field 'hight'; there are layer, .*newer version": good | {"hight": 3},
        "a Layer has no field 'decay'; there are width,": good | {"layer": layer | {"decay": 1}},
        "this Layer is not complete or not valid .*num_heads": good | {"layer": {"width": 8}},
        "a Layer is described by its fields width, .* got 3": good | {"layer": 3},
        "not complete or not valid .*layer": {"kind": "LanguageConfig", "depth": 1},
        "not valid .depth must be a positive integer, got 'two'": good | {"depth": "two"},
        "attention must be one of linear, softmax, reformer, got 'x'": good | {"layer": layer | {"attention": "x"}},
    }.items():
        with pytest.raises(ValueError, match=f"(?s)^here: .*{match}"):
            from_json(form, "here")
    with pytest.raises(ValueError, match="no model has a Layer; configs are ImageConfig"):
        build(layer_of())  # type: ignore[arg-type]


def test_a_config_is_frozen_and_complete():
    """All fields are plain values that JSON keeps, so that a file says everything about its model."""
    for config in PRESETS.values():
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.depth = 3  # type: ignore[misc]
        assert set(to_json(config)) == {"kind"} | {field.name for field in dataclasses.fields(config)}
