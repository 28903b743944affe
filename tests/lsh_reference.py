"""LSH attention as loops over tokens, in float64 numpy: hash, sort, cut, mask, a softmax for each round, and their mix.

Shares nothing with the library but the shape of the draw, (rounds, 2, heads, width, columns).
"""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def attend(qk: Array, v: Array, draw: Array, chunk_length: int, causal: bool = True) -> Array:
    """(batch, time, heads, width), (batch, time, heads, values) -> (batch, time, heads, values)."""
    out = np.zeros(v.shape)
    for b in range(qk.shape[0]):
        for h in range(qk.shape[2]):
            out[b, :, h] = attend_one(qk[b, :, h], v[b, :, h], draw[:, :, h], chunk_length, causal)
    return out


def attend_one(x: Array, v: Array, draw: Array, chunk_length: int, causal: bool) -> Array:
    """One head of one row: for each token the mix of its rounds."""
    out = np.zeros(v.shape)
    rounds = [seen_in_round(x, one, chunk_length, causal) for one in draw]
    keys = x / np.sqrt((x**2).sum(1, keepdims=True) + 1e-6)
    for i in range(len(x)):
        scores = x[i] @ keys.T / math.sqrt(x.shape[1])
        means, norms = [], []
        for seen in rounds:
            if seen[i]:
                weights = np.exp(scores[seen[i]])
                means.append(weights @ v[seen[i]] / weights.sum())
                norms.append(math.log(weights.sum()))
        if means:
            shares = np.exp(np.array(norms) - max(norms))
            out[i] = shares @ np.array(means) / shares.sum()
        else:
            out[i] = v[i]
    return out


def seen_in_round(x: Array, draw: Array, chunk_length: int, causal: bool) -> list[list[int]]:
    """Whom each token sees."""
    buckets = hash_all(x, draw, chunk_length)
    order = sorted(range(len(x)), key=lambda i: (buckets[i], i))
    chunk = {token: rank // chunk_length for rank, token in enumerate(order)}
    seen = []
    for i in range(len(x)):
        others = range(i) if causal else [j for j in range(len(x)) if j != i]
        near = [j for j in others if chunk[i] - 1 <= chunk[j] <= chunk[i]]
        seen.append([j for j in near if buckets[j] == buckets[i]])
    return seen


def hash_all(x: Array, draw: Array, chunk_length: int) -> list[int]:
    """The bucket of each token: two buckets a chunk, or the product of two numbers that is at least as much."""
    chunks, columns = math.ceil(len(x) / chunk_length), draw.shape[-1]
    if chunks <= 1:
        return [0] * len(x)
    if chunks <= columns:
        return [sharpest(x_i, draw[0, :, :chunks]) for x_i in x]
    half = next((n for n in range(1, columns) if (2 * n) ** 2 >= 2 * chunks), columns)
    return [sharpest(x_i, draw[0, :, :half]) + 2 * half * sharpest(x_i, draw[1, :, :half]) for x_i in x]


def sharpest(x: Array, rotation: Array) -> int:
    """argmax [xR; -xR]"""
    return int(np.argmax(np.concatenate([x @ rotation, -(x @ rotation)])))
