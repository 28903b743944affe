"""MATLAB's files, version 5, as far as piano rolls need it: arrays of numbers, and cells of them.

    read_mat(data)["traindata"]        a list of arrays for a cell, in column order; else one array

128 bytes of text and version, then elements: type and size (4 + 4 bytes; or 2 + 2, with up to 4 bytes of data in the
same 8), the data, zeros up to a multiple of 8. A compressed element is another one under zlib; a matrix is a row of
elements: flags with the class, dimensions, name, and the numbers column by column, or the cell's matrices.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator

import numpy as np

NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
MATRIX, COMPRESSED = 14, 15
CELL, LEAST, MOST = 1, 6, 15  # classes: cells, and double … uint64
Value = np.ndarray | list[np.ndarray]


def read_mat(data: bytes, where: object = "this file") -> dict[str, Value]:
    """Every variable by its name."""
    order = {b"IM": "<", b"MI": ">"}.get(data[126:128])
    if order is None or not data.startswith(b"MATLAB 5"):
        raise ValueError(f"{where} is no MATLAB file of version 5: it begins with {data[:20]!r}")
    try:
        return dict(_matrix(content, order) for kind, content in _elements(data[128:], order) if kind == MATRIX)
    except (struct.error, zlib.error, IndexError, KeyError, ValueError) as error:
        raise ValueError(f"{where} is damaged, or holds more than numbers and cells: {error}") from error


def _elements(data: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    """Type and content of each; compressed ones are unpacked."""
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack(f"{order}II", data[at : at + 8])
        if kind >> 16:  # a small one: the size in the upper half, the content in place of the size
            yield kind & 0xFFFF, data[at + 4 : at + 4 + (kind >> 16)]
            at += 8
            continue
        content = data[at + 8 : at + 8 + size]
        if len(content) < size:
            raise ValueError(f"it ends {size - len(content)} bytes too early")
        if kind == COMPRESSED:
            yield from _elements(zlib.decompress(content), order)
            at += 8 + size
        else:
            yield kind, content
            at += 8 + size + -size % 8


def _matrix(data: bytes, order: str) -> tuple[str, Value]:
    parts = list(_elements(data, order))
    flags, dimensions, name = (content for _, content in parts[:3])
    kind = struct.unpack(f"{order}I", flags[:4])[0] & 0xFF
    shape = np.frombuffer(dimensions, f"{order}i4")
    if kind == CELL:
        made = [_matrix(content, order)[1] for _, content in parts[3:]]
        if len(made) != math.prod(shape.tolist()):
            raise ValueError(f"a cell of {math.prod(shape.tolist())} arrays holds {len(made)}")
        return name.decode("latin-1"), made  # type: ignore[return-value]
    if not LEAST <= kind <= MOST:
        raise ValueError(f"{name.decode('latin-1')!r} is of class {kind}, which is neither a cell nor numbers")
    type_, content = parts[3]
    return name.decode("latin-1"), np.frombuffer(content, order + NUMBERS[type_]).reshape(shape, order="F")
