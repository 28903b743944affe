"""Speech as data: who is in which split, what is skipped, what is kept on disk, batches that can be entered again."""

from __future__ import annotations

import warnings

import pytest
import torch
from sound_cases import LEXICON, RATE, little_ocean, noise, said, write

from linattn.audio import FrontEnd, fbank, read
from linattn.train.speech import features as features_module
from linattn.train.speech.corpus import held_out, sound_folder, speechocean762
from linattn.train.speech.data import SpeechWalk, cut, in_order, load_speech


@pytest.fixture(scope="module")
def ocean(tmp_path_factory):
    return little_ocean(tmp_path_factory.mktemp("ocean"))


def load(ocean, split="train", **options):
    return load_speech("speechocean762", split=split, data_dir=ocean, **{"cache_dir": None, **options})


def test_splits_share_no_speaker(ocean):
    parts = {split: load(ocean, split) for split in ("train", "dev", "test")}
    speakers = [set(part.speakers) for part in parts.values()]
    assert [len(some) for some in speakers] == [2, 12, 2]
    assert not (speakers[0] & speakers[1] or speakers[0] & speakers[2] or speakers[1] & speakers[2])
    assert speakers[1] == held_out(speakers[0] | speakers[1], 12)
    assert {len(part) for part in parts.values()} == {4, 24}
    assert len({part.sha256 for part in parts.values()}) == 3


def test_the_held_out_speakers_are_a_fixed_choice():
    assert held_out({"0001", "0005", "0006", "0026", "0036"}, 2) == {"0005", "0026"}


def test_labels_are_phonemes_without_stress(ocean):
    data = load(ocean, "test")
    assert data.label_names == ("AH", "B", "IY", "OW", "T")
    spoken = {"BEE": ["B", "IY"], "TOE": ["T", "OW"], "A": ["AH"]}
    for text, labels in zip(data.texts, data.labels, strict=True):
        assert [data.label_names[i - 1] for i in labels] == [p for word in text.split() for p in spoken[word]]


def test_characters_and_tokens(ocean):
    spelt = load(ocean, "test", units="characters")
    assert spelt.label_names == tuple(" abeot")
    assert "".join(spelt.label_names[i - 1] for i in spelt.labels[0]) == spelt.texts[0].lower()
    assert load(ocean, "test", units="tokens").label_names == ("A", "BEE", "TOE")


def test_frames_are_those_of_the_front_end(ocean):
    data = load(ocean, "test")
    sound = read(speechocean762(ocean / "speechocean762").splits["test"][0].contents())
    assert torch.equal(data.versions[0].each()[0], data.front.whole(sound.samples))
    known = speechocean762(ocean / "speechocean762").splits["train"]
    train = torch.cat([fbank(read(utterance.contents()).samples) for utterance in known])
    assert torch.allclose(torch.tensor(data.front.mean), train.mean(0), atol=1e-4)
    assert torch.allclose(torch.tensor(data.front.std), train.std(0), atol=1e-4)


def test_a_trained_front_end_is_used_as_it_is(ocean):
    front = FrontEnd(bins=20).fitted(torch.full((20,), 9.0), torch.full((20,), 3.0))
    assert load(ocean, "dev", front=front).front == front


def test_speeds_are_for_training_only(ocean):
    train = load(ocean, "train", speeds=(0.9, 1.0, 1.1))
    lengths = [version.lengths.double() for version in train.versions]
    assert len(load(ocean, "dev", speeds=(0.9, 1.1)).versions) == 1
    assert all(((lengths[0] / lengths[i]) - speed).abs().max() < 0.03 for i, speed in ((1, 0.9), (2, 1.1)))


def folder_of(tmp_path, sounds: int = 6):
    for i in range(sounds):
        word = ("BEE", "TOE", "A")[i % 3]
        write(tmp_path / f"{i}.wav", said(word, seed=i))
        (tmp_path / f"{i}.txt").write_text(f"{word}!\n")
    return tmp_path


def test_what_cannot_be_used_is_named_and_skipped(tmp_path):
    folder = folder_of(tmp_path, 24)
    (folder / "broken.wav").write_text("no sound")
    (folder / "broken.txt").write_text("bee")
    write(folder / "silent.flac", torch.zeros(RATE))
    (folder / "silent.txt").write_text("bee")
    write(folder / "long.wav", noise(3.0))
    (folder / "long.txt").write_text("bee")
    write(folder / "mute.wav", noise())
    (folder / "mute.txt").write_text("…")
    write(folder / "untold.wav", noise())
    reasons = {
        "broken.wav": "cannot be read as sound",
        "silent.flac": "is silent",
        "long.wav": "lasts 3.0 s",
        "mute.wav": "its transcript is empty",
        "untold.wav": "no transcript untold.txt",
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts = [load_speech(folder, split=s, cache_dir=None, max_seconds=2.0) for s in ("train", "dev", "test")]
    assert sorted(name for part in parts for name in part.names) == sorted(f"{i}.wav" for i in range(24))
    skipped = {text.split(" ")[0]: text for part in parts for text in part.skipped}
    assert skipped.keys() == reasons.keys() and all(reasons[name] in text for name, text in skipped.items())
    assert any("skipped" in str(warning.message) for warning in caught)


def test_a_folder_may_bring_a_lexicon(tmp_path):
    folder = folder_of(tmp_path / "sounds", 3)
    for path in folder.glob("*.txt"):
        path.write_text(path.read_text().strip("!\n").lower())
    (tmp_path / "words").write_text(LEXICON)
    data = load_speech(folder, cache_dir=None, lexicon=str(tmp_path / "words"))
    assert data.label_names == ("AH", "B", "IY", "OW", "T")
    (folder / "0.txt").write_text("bee zoo")
    (folder / "1.txt").write_text("zoo")
    (folder / "2.txt").write_text("zoo")
    with pytest.raises(ValueError, match=r"has no utterance.*the lexicon does not have 'zoo'"):
        load_speech(folder, cache_dir=None, lexicon=str(tmp_path / "words"))


def test_speakers_of_a_folder_stay_together(tmp_path):
    for i in range(60):
        write(tmp_path / f"speaker{i // 3}" / f"{i}.wav", noise(0.1, seed=i))
        (tmp_path / f"speaker{i // 3}" / f"{i}.txt").write_text("bee")
    splits = sound_folder(tmp_path).splits
    assert {name: len(part) for name, part in splits.items()} == {"train": 54, "dev": 3, "test": 3}
    assert len({u.speaker for u in splits["dev"]}) == 1


def test_features_are_kept_on_disk(ocean, tmp_path, monkeypatch):
    first = load(ocean, "dev", cache_dir=str(tmp_path))
    files = sorted(tmp_path.iterdir())
    assert [path.suffix for path in files] == [".safetensors"] * 2  # train's statistics, and dev
    monkeypatch.setattr(features_module, "read", lambda *_, **__: pytest.fail("decoded again"))
    again = load(ocean, "dev", cache_dir=str(tmp_path))
    assert torch.equal(first.versions[0].flat, again.versions[0].flat) and first.names == again.names
    monkeypatch.undo()
    files[0].write_bytes(files[0].read_bytes()[:1000])
    assert load(ocean, "dev", cache_dir=str(tmp_path)).sha256 == first.sha256
    load(ocean, "dev", cache_dir=str(tmp_path), bins=20)
    assert len(list(tmp_path.iterdir())) == 4, "other options are other files"


def test_utterances_of_a_speaker_are_joined(ocean):
    apart, data = load(ocean, "dev"), load(ocean, "dev", join=10_000)
    assert len(data) == 12 and data.speakers == tuple(dict.fromkeys(apart.speakers))
    assert torch.equal(data.versions[0].flat, apart.versions[0].flat)
    assert torch.equal(torch.cat(data.labels), torch.cat(apart.labels))
    assert len(load(ocean, "dev", join=1)) == 24
    spelt = load(ocean, "dev", join=10_000, units="characters")
    assert "".join(spelt.label_names[i - 1] for i in spelt.labels[0]) == spelt.texts[0].lower()


def test_batches_hold_similar_lengths_and_no_more_frames_than_allowed(ocean):
    data = load(ocean, "dev", batch_frames=400)
    for batch in in_order(data, 100):
        assert batch.frames.shape[:2] == (len(batch.rows), int(batch.lengths.max()))
        assert batch.frames.shape[0] * batch.frames.shape[1] <= 400
        for row, frames, n in zip(batch.rows.tolist(), batch.frames, batch.lengths.tolist(), strict=True):
            assert torch.equal(frames[:n], data.versions[0].each()[row])
    assert sorted(torch.cat([b.rows for b in in_order(data, 5)]).tolist()) == list(range(24))
    made = cut(torch.tensor([2, 0, 1]), torch.tensor([50, 999, 10]), 9, 100)
    assert [rows.tolist() for rows in made] == [[2, 0], [1]]


def test_each_epoch_visits_every_utterance_once_and_can_be_entered(ocean):
    data = load(ocean, "dev", batch_frames=500)
    walk, epochs = SpeechWalk(data, 5, seed=3), []
    for _ in range(3):
        rows = [next(walk).rows]
        while walk.offset < len(walk._batches):
            rows.append(next(walk).rows)
        epochs.append(torch.cat(rows).tolist())
    assert all(sorted(rows) == list(range(24)) for rows in epochs) and epochs[0] != epochs[1]
    walk = SpeechWalk(data, 5, seed=3)
    for _ in range(7):
        next(walk)
    place, expected = walk.state_dict(), [next(walk).frames for _ in range(9)]
    again = SpeechWalk(data, 5, seed=0)
    again.load_state_dict(place)
    assert all(torch.equal(next(again).frames, x) for x in expected)
    begun = SpeechWalk(data, 5, seed=0)
    next(begun)  # its own order of the first epoch must not stay
    begun.load_state_dict(SpeechWalk(data, 5, seed=3).state_dict())
    assert torch.equal(next(begun).rows, next(SpeechWalk(data, 5, seed=3)).rows)
    with pytest.raises(ValueError, match="of another walk: its batch is 5, here it is 6"):
        SpeechWalk(data, 6, seed=3).load_state_dict(place)


def test_an_epoch_hears_utterances_at_several_speeds(ocean):
    data = load(ocean, "train", speeds=(0.8, 1.0))
    walk, heard = SpeechWalk(data, 4, seed=0), set()
    for batch in (next(walk) for _ in range(10)):
        for row, n, frames in zip(batch.rows.tolist(), batch.lengths.tolist(), batch.frames, strict=True):
            version = [int(v.lengths[row]) for v in data.versions].index(n)
            assert torch.equal(frames[:n], data.versions[version].each()[row])
            heard.add(version)
    assert heard == {0, 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "nothing"}, "no speech 'nothing': it is neither speechocean762 nor a folder"),
        ({"name": "speechocean762", "data_dir": "/nowhere"}, r"holds no speechocean762.*openslr\.org/101"),
        ({"units": "syllables"}, "units must be one of phonemes, characters, tokens, got 'syllables'"),
        ({"scaling": "none"}, "scaling must be one of"),
        ({"split": "valid"}, "split must be one of train, dev, test"),
    ],
)
def test_wrong_data_is_named(ocean, options, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_speech(**{"name": "speechocean762", "data_dir": ocean, "cache_dir": None, **options})


def test_a_folder_without_speech_says_what_it_expected(tmp_path):
    with pytest.raises(ValueError, match=r"holds no speech: expected NAME.wav with its transcript in NAME.txt"):
        load_speech(tmp_path, cache_dir=None)
    write(tmp_path / "a.wav", noise())
    with pytest.raises(ValueError, match=r"of 1 sound files none has a NAME.txt beside it"):
        load_speech(tmp_path, cache_dir=None)
    (tmp_path / "a.txt").write_text("bee")
    with pytest.raises(ValueError, match="has no lexicon of words as phonemes: take units=characters"):
        load_speech(tmp_path, cache_dir=None, units="phonemes")
