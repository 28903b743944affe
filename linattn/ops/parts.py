"""The structures of csrc/model_step.h, field by field, for ctypes; and what narrow weights are.

A test compares their sizes with those that the library tells (`linattn_model_sizes`).
"""

from __future__ import annotations

import ctypes

import torch

from linattn._typing import Float, Tensor

WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


def _structure(name: str, **fields: type) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_pointer, _i64, _i32, _f32, _f64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_double
ProductPart = _structure(
    "ProductPart", weight=_pointer, scale=_pointer, bias=_pointer, inputs=_i64, outputs=_i64, kind=_i32, activation=_i32
)
NormPart = _structure("NormPart", weight=_pointer, bias=_pointer, kind=_i32, eps=_f32)
BlockPart = _structure(
    "BlockPart",
    norm=NormPart * 2,
    qkv=ProductPart,
    out=ProductPart,
    enter=ProductPart,
    leave=ProductPart,
    kv=_pointer,
    kv_low=_pointer,
    z=_pointer,
    z_low=_pointer,
    heads=_i64,
    kv_heads=_i64,
    key_width=_i64,
    value_width=_i64,
    map=_i32,
    rotary=_i32,
    norm_first=_i32,
    root_scale=_f32,
    eps=_f32,
    conv_norm=NormPart,
    conv=_pointer,
    conv_bias=_pointer,
    recent=_pointer,
    taps=_i64,
)
ModelPart = _structure(
    "ModelPart",
    blocks=_pointer,
    num_blocks=_i64,
    width=_i64,
    embedding=_pointer,
    enter=ProductPart,
    values=_i64,
    embedded=_i64,
    angles=_pointer,
    tables=_pointer * 3,
    places=_i64,
    columns=_i64,
    channels=_i64,
    rotary_angles=_pointer,
    norm=NormPart,
    head=ProductPart,
    position=_i32,
    head_kind=_i32,
    mixtures=_i64,
)
RunPart = _structure(
    "RunPart",
    rows=_i64,
    steps=_i64,
    pending=_pointer,
    seen=_pointer,
    num_seen=_i64,
    left=_pointer,
    uniforms=_pointer,
    frames=_pointer,
    params=_pointer,
    made=_pointer,
    stop=_pointer,
    num_stop=_i64,
    temperature=_f64,
    top_p=_f64,
    top_k=_i64,
    done=_i64,
    not_finite=_i64,
)
PARTS = (ProductPart, NormPart, BlockPart, ModelPart, RunPart)


def scales(weight: Float[Tensor, "O I"]) -> Float[Tensor, " O"]:
    """What each output's int8 weights are multiplied by."""
    return (weight.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)  # of a row of zeros too


def rounded(weight: Float[Tensor, "O I"], kind: str) -> Float[Tensor, "O I"]:
    """The fp32 weights that the narrow ones stand for."""
    if kind == "int8":
        scale = scales(weight)[:, None]
        return (weight / scale).round() * scale
    return weight.to(WEIGHTS[kind]).to(weight.dtype)
