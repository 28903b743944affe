"""Batches: each example once an epoch, and a place that can be gone on from, bit for bit."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch

from linattn.train.data import Dataset, batches, in_order, load, streams


def numbered(n: int) -> Dataset:
    """n images of 2 × 3 × 1 that hold their own number, and it is their label: n ≤ 256."""
    number = torch.arange(n, dtype=torch.uint8)
    return Dataset("numbered", "train", number[:, None, None, None].expand(n, 2, 3, 1).contiguous(), number)


def text(n: int) -> Dataset:
    """A text in which byte t is t: n ≤ 256."""
    return Dataset("text", "train", torch.arange(n, dtype=torch.uint8))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def take(walk, n: int) -> list[list[int]]:
    return [batch.data.flatten(1)[:, 0].tolist() for batch in itertools.islice(walk, n)]


def equal(a, b) -> bool:
    """Two batches, bit for bit."""
    same = [
        (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y))
        for x, y in zip(a[:3], b[:3], strict=True)
    ]
    return all(same) and a.fresh == b.fresh


@pytest.mark.parametrize("drop_last", [True, False])
def test_an_epoch_visits_every_example_once(drop_last):
    walk = batches(numbered(23), 5, generator=seeded(0), drop_last=drop_last)
    epochs = [take(walk, 4 if drop_last else 5) for _ in range(3)]
    for epoch in epochs:
        seen = [number for batch in epoch for number in batch]
        assert [len(batch) for batch in epoch] == [5, 5, 5, 5] + [3] * (not drop_last)
        assert len(set(seen)) == len(seen) and (drop_last or sorted(seen) == list(range(23)))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert walk.epoch == 2


def test_what_drop_last_drops_is_another_each_epoch():
    walk = batches(numbered(23), 5, generator=seeded(0))
    assert set(range(23)) == {number for batch in take(walk, 4 * 20) for number in batch}


def test_the_order_is_the_generators():
    first, same, other = (take(batches(numbered(100), 10, generator=seeded(seed)), 15) for seed in (1, 1, 2))
    assert first == same != other
    torch.manual_seed(3)
    unnamed = take(batches(numbered(100), 10), 5)
    torch.manual_seed(3)
    assert unnamed == take(batches(numbered(100), 10), 5)


def test_rows_stay_together():
    rng = np.random.default_rng(0)
    data, mask = rng.integers(0, 200, (50, 7), dtype=np.uint8), rng.random((50, 7)) < 0.5
    data[:, 0] = np.arange(50)
    labels = rng.integers(0, 10, 50, dtype=np.uint8)
    dataset = Dataset("d", "train", torch.from_numpy(data), torch.from_numpy(labels), torch.from_numpy(mask))
    for batch in itertools.islice(batches(dataset, 8, generator=seeded(0)), 20):
        rows = batch.data[:, 0].numpy()
        assert np.array_equal(batch.data.numpy(), data[rows])
        assert batch.labels is not None and np.array_equal(batch.labels.numpy(), labels[rows])
        assert batch.mask is not None and np.array_equal(batch.mask.numpy(), mask[rows])
        assert batch.fresh


def test_a_batch_can_be_written_to():
    dataset = text(100)
    walks = (
        batches(dataset, 2, window=9),
        streams(dataset, 2, 9),
        in_order(dataset, 2, window=9),
        in_order(dataset, 1, window=99 + 1),
    )
    for walk in walks:
        next(walk).data.zero_()
    next(batches(numbered(4), 4)).data.zero_()
    assert torch.equal(dataset.data, torch.arange(100, dtype=torch.uint8))


# Texts


def test_random_windows_predict_every_byte_once_an_epoch():
    """But those before the random start and after the last whole window; over epochs all but the first."""
    walk = batches(text(200), 1, window=7, generator=seeded(0))
    starts, ever = set(), set()
    for epoch in range(30):
        predicted = []
        while not predicted or walk.offset < len(walk._order):
            row = next(walk).data[0].tolist()
            assert row == list(range(row[0], row[0] + 8))
            predicted += row[1:]
        assert walk.epoch == epoch
        assert sorted(predicted) == list(range(min(predicted), max(predicted) + 1))
        assert min(predicted) <= 7 and max(predicted) > 199 - 7
        starts.add(min(predicted))
        ever |= set(predicted)
    assert starts == set(range(1, 8)) and ever == set(range(1, 200))


@pytest.mark.parametrize(("n", "rows", "window"), [(200, 3, 7), (200, 1, 199), (61, 4, 5), (256, 8, 1)])
def test_streams_against_a_reshaped_array(n, rows, window):
    length = n // rows
    parts = np.arange(rows * length).reshape(rows, length)
    steps = (length - 1) // window
    walk = streams(text(n), rows, window)
    for i in range(2 * steps + 1):
        begin = i % steps * window
        batch = next(walk)
        assert np.array_equal(batch.data.numpy(), parts[:, begin : begin + window + 1])
        assert batch.fresh == (i % steps == 0)
    assert walk.epoch == 2


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("n", [2, 7, 8, 9, 50, 57, 58])
def test_reading_a_text_in_order_predicts_every_byte_once(n, batch_size):
    seen = list(in_order(text(n), batch_size, window=7))
    rows = [row for batch in seen for row in batch.data.tolist()]
    assert [byte for row in rows for byte in row[1:]] == list(range(1, n))
    assert [row[0] for row in rows] == [0] + [row[-1] for row in rows[:-1]]
    whole, rest = divmod(n - 1, 7)
    full, last = divmod(whole, batch_size)
    assert [len(batch.data) for batch in seen] == [batch_size] * full + [last] * (last > 0) + [1] * (rest > 0)
    assert [len(row) for row in rows] == [8] * whole + [rest + 1] * (rest > 0)
    assert [batch.fresh for batch in seen] == [batch_size > 1 or i == 0 for i in range(len(seen))]


def test_in_order_gives_every_example_once():
    dataset = load("digits", split="dev")
    seen = list(in_order(dataset, 64))
    assert [len(batch.data) for batch in seen] == [64, 64, 64, 8]
    assert torch.equal(torch.cat([batch.data for batch in seen]), dataset.data)
    labels = torch.cat([batch.labels for batch in seen if batch.labels is not None])
    assert dataset.labels is not None and torch.equal(labels, dataset.labels)


# Generated data


def test_copies_are_new_in_each_epoch():
    walk = batches(load("copy", num_examples=64), 32, generator=seeded(0))
    rows = [tuple(row) for batch in itertools.islice(walk, 8) for row in batch.data.tolist() if row[12]]
    assert len(set(rows)) == len(rows) > 150


# Going on

WALKS = {
    "images": lambda seed: batches(numbered(23), 5, generator=seeded(seed)),
    "images, all": lambda seed: batches(numbered(23), 5, generator=seeded(seed), drop_last=False),
    "windows": lambda seed: batches(text(100), 2, window=9, generator=seeded(seed)),
    "copies": lambda seed: batches(load("copy", num_examples=20), 4, generator=seeded(seed)),
    "streams": lambda seed: streams(text(100), 3, 4),
}


@pytest.mark.parametrize("name", WALKS)
def test_going_on_is_as_if_never_stopped(name):
    """At every place of the first three epochs, through JSON, in a loader made with another seed, fresh or used."""
    whole, walk = list(itertools.islice(WALKS[name](0), 30)), WALKS[name](0)
    used = WALKS[name](9)
    next(used)
    for done in range(20):
        place = json.loads(json.dumps(walk.state_dict()))
        for resumed in (WALKS[name](7), used):
            resumed.load_state_dict(place)
            again = list(itertools.islice(resumed, 10))
            assert all(equal(a, b) for a, b in zip(again, whole[done : done + 10], strict=True)), (
                f"after {done} batches"
            )
        assert equal(next(walk), whole[done])
    assert walk.epoch >= 2


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: batches(numbered(22), 5), "its data is 'numbered train"),
        (lambda: batches(numbered(23), 4), "its batch_size is 5, here it is 4"),
        (lambda: batches(numbered(23), 5, drop_last=False), "its drop_last is True, here it is False"),
        (lambda: batches(text(100), 5, window=3), "its window is None, here it is 3"),
        (lambda: streams(text(100), 5, 3), "a place has the entries epoch, offset, seed, kind"),
    ],
)
def test_a_place_of_another_walk_is_refused(made, message):
    place = batches(numbered(23), 5).state_dict()
    with pytest.raises(ValueError, match=message):
        made().load_state_dict(place)


def test_a_place_of_other_streams_is_refused():
    with pytest.raises(ValueError, match="its window is 3, here it is 4"):
        streams(text(100), 5, 4).load_state_dict(streams(text(100), 5, 3).state_dict())
    with pytest.raises(ValueError, match="got none"):
        streams(text(100), 5, 4).load_state_dict({})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: batches(numbered(4), 5),
            "has 4 examples, which make no batch of 5: take a smaller batch_size, or drop",
        ),
        (lambda: batches(text(20), 3, window=7), "has 1 windows, which make no batch of 3: take a smaller batch_size"),
        (lambda: batches(text(13), 1, window=7), "has 0 windows, which make no batch of 1: take a smaller window"),
        (lambda: batches(text(13), 1, window=7, drop_last=False), "take a smaller window"),
        (lambda: batches(numbered(4), 0), "batch_size must be a positive integer, got 0"),
        (lambda: batches(text(4), 1, window=0), "window must be a positive integer, got 0"),
        (lambda: batches(text(20), 1), r"text is a text, got window=None: pass window="),
        (lambda: batches(numbered(4), 1, window=2), "numbered holds images, got window=2: window= is for texts only"),
        (lambda: in_order(numbered(4), 1, window=2), "window= is for texts only"),
        (lambda: in_order(text(4), 1), "pass window="),
        (lambda: streams(numbered(4), 1, 1), "window= is for texts only"),
        (lambda: streams(text(20), 3, 6), "has 20 bytes: 3 streams of 6, too short for a window of 6"),
        (lambda: streams(text(2), 3, 1), "too short for a window of 1"),
    ],
)
def test_what_cannot_be_walked_is_an_error_at_once(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_smallest_walks_work():
    assert take(batches(text(14), 1, window=7), 5) and take(streams(text(6), 3, 1), 3) == [[0, 2, 4]] * 3
    assert [len(row) for row in take(batches(numbered(4), 5, drop_last=False), 2)] == [4, 4]
