"""The front end: each part against another library or its definition, and in pieces the same as whole."""

from __future__ import annotations

import kaldi_native_fbank
import numpy as np
import pytest
import scipy.signal
import torch
from helpers import assert_as_accurate
from sound_cases import RATE, noise, pieces, tone
from torch import Tensor

from linattn.audio import BadSound, FrontEnd, Resampler, SpecAugment, at_speed, fbank, resample
from linattn.audio.fbank import FilterBank
from linattn.audio.normalize import Running, by_utterance, scaled
from linattn.audio.resample import filters

RATIOS = [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (9, 10), (11, 10), (16_001, 16_000)]


@pytest.mark.parametrize(("before", "after"), RATIOS[:5])
@pytest.mark.parametrize("count", [1, 400, 20_001])
def test_resampling_against_scipy(before, after, count):
    """Whose upfirdn takes our filter, interleaved, and does the rest in another way."""
    x = noise(count / RATE)
    made = Resampler(before, after)
    taps = filters(made.up, made.down)
    interleaved = taps.numpy()[:, ::-1].T.reshape(-1)  # g at -h, -h + 1/L, …
    ends = (taps.shape[1] - 1) * made.up + 1
    fine = scipy.signal.upfirdn(interleaved[:ends], x.double().numpy(), made.up)
    fine = np.append(fine[taps.shape[1] // 2 * made.up :], np.zeros(made.up))
    expected = fine[:: made.down][: -(-count * made.up // made.down)]
    got = resample(x, before, after)
    assert len(got) == len(expected)
    assert np.abs(got.numpy() - expected).max() < 1e-6 * max(1e-3, np.abs(expected).max())


def test_what_both_rates_hold_is_kept_and_the_rest_is_gone():
    for hertz in (200, 3_000, 7_000):
        assert (resample(tone(hertz, 1.0, 44_100), 44_100, RATE) - tone(hertz, 1.0))[800:-800].abs().max() < 1e-5
    for hertz in (8_300, 12_000, 20_000):  # would be heard as 7,700, 4,000 and 4,000
        assert resample(tone(hertz, 1.0, 44_100), 44_100, RATE)[800:-800].abs().max() < 1e-4


@pytest.mark.parametrize(("before", "after"), RATIOS)
def test_resampling_in_pieces(before, after):
    x, made = noise(0.3), Resampler(before, after)
    got = torch.cat([*(made.push(piece) for piece in pieces(x, seed=before)), made.finish()])
    assert torch.allclose(got, resample(x, before, after), rtol=0, atol=1e-7)
    assert len(made.kept) < 4 * made.half + made.inputs


def test_speed_changes_length_and_pitch():
    fast = at_speed(tone(300, 1.0), 1.1)
    assert len(fast) == -(-RATE * 10 // 11)
    assert (fast - tone(330, 1.0)[: len(fast)])[800:-800].abs().max() < 1e-4


def kaldi(samples: Tensor, rate: int, bins: int) -> Tensor:
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.dither, options.frame_opts.samp_freq = 0.0, rate
    options.mel_opts.num_bins = bins
    online = kaldi_native_fbank.OnlineFbank(options)
    online.accept_waveform(rate, (32768 * samples).tolist())
    online.input_finished()
    return torch.stack([torch.tensor(online.get_frame(i)) for i in range(online.num_frames_ready)])


@pytest.mark.parametrize(("rate", "bins"), [(16_000, 40), (16_000, 80), (8_000, 40)])
def test_filter_banks_against_kaldi(rate, bins):
    x = noise(1.0, rate)
    expected = kaldi(x, rate, bins)
    got = fbank(x, rate, bins)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 1e-3  # Kaldi's are float32


def test_digital_silence_is_zero():
    assert fbank(torch.zeros(RATE)).abs().max() == 0
    assert fbank(noise() * 1e-2).min() > 0


def test_filter_banks_in_pieces():
    x, bank = noise(0.6), FilterBank()
    got = torch.cat([bank.push(piece) for piece in pieces(x, seed=3)])
    assert torch.equal(got, fbank(x))
    assert len(bank.kept) < 400


def features(frames: int = 300, bins: int = 5) -> Tensor:
    """Far from 0, and no bin like another."""
    x = torch.randn(frames, bins, generator=torch.Generator().manual_seed(0))
    return 10 + torch.arange(bins) + x * (1 + torch.arange(bins))


def test_running_normalisation_against_its_definition():
    x, mean, std, prior, horizon = features(), torch.arange(5.0) + 9, torch.arange(5.0) + 2, 20, 90
    m, q, expected = mean.double(), (std**2 + mean**2).double(), []
    for t, frame in enumerate(x.double(), 1):
        w = min(prior + t, horizon)
        m, q = m + (frame - m) / w, q + (frame**2 - q) / w
        expected.append((frame - m) / (q - m**2).sqrt())
    exact = torch.stack(expected)
    got = Running(mean, std, prior=prior, horizon=horizon).push(x)
    assert_as_accurate(got, exact, exact.float())


@pytest.mark.parametrize("horizon", [20, 90, 100_000])
def test_running_normalisation_in_pieces(horizon):
    x, mean, std = features(2500), torch.zeros(5), torch.ones(5)
    whole = Running(mean, std, prior=20, horizon=horizon).push(x)
    made = Running(mean, std, prior=20, horizon=horizon)
    assert torch.allclose(torch.cat([made.push(p) for p in pieces(x, 1)]), whole, rtol=0, atol=1e-6)


def test_running_normalisation_does_not_see_the_future():
    x = features()
    changed = torch.cat([x[:100], 100 * x[100:]])
    made = [Running(torch.zeros(5), torch.ones(5)).push(some)[:100] for some in (x, changed)]
    assert torch.equal(*made)


def test_an_utterance_is_normalised_to_mean_0_and_spread_1():
    x = torch.cat([features(), torch.full((300, 1), 3.0)], 1)
    got = by_utterance(x)
    assert got.mean(0).abs().max() < 1e-6
    assert (got[:, :5].std(0, unbiased=False) - 1).abs().max() < 1e-6
    assert got[:, 5].abs().max() == 0, "what never changes says nothing"


def front(**options) -> FrontEnd:
    return FrontEnd(**options).fitted(torch.full((40,), 12.0), torch.full((40,), 2.0))


@pytest.mark.parametrize("scaling", ["running", "global"])
@pytest.mark.parametrize("rate", [16_000, 44_100, 8_000])
def test_a_stream_gives_the_frames_of_the_whole(scaling, rate):
    made, x = front(scaling=scaling), noise(0.7, rate)
    whole, stream = made.whole(x, rate), made.stream(rate)
    got = torch.cat([*(stream.push(piece) for piece in pieces(x, seed=2)), stream.finish()])
    assert got.shape == whole.shape and len(whole) == 68
    assert torch.allclose(got, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FrontEnd(scaling="none"), "scaling must be one of running, utterance, global, got 'none'"),
        (lambda: FrontEnd(rate=4_000), "rate must be at least 8000"),
        (lambda: FrontEnd(bins=40, mean=(1.0,)), "mean must have a number for each of 40 bins"),
        (lambda: FrontEnd().whole(noise()), "begins with the mean and spread of a training set"),
        (lambda: front(scaling="utterance").stream(), "a stream takes 'running' or 'global'"),
        (lambda: front().whole(noise(0.01)), "lasts 10 ms, less than a frame of 25 ms"),
        (lambda: fbank(noise(), 8_000, 400), "400 bins are too many at 8000"),
        (lambda: resample(noise(), 0, 1), "a sampling rate is a positive integer .* got before=0"),
        (lambda: Running(torch.zeros(2), torch.ones(2), prior=0), "prior frames must be 1 … horizon"),
    ],
)
def test_wrong_options_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert issubclass(BadSound, ValueError)


def test_augmentation_blanks_stripes_within_each_utterance():
    x, lengths = torch.ones(64, 200, 40), torch.tensor([200, 50] * 32)
    made = SpecAugment(times=2, time_width=30, time_part=0.2, bands=2, band_width=8)
    got = made(x, lengths, torch.Generator().manual_seed(0))
    hidden = got == 0
    in_time, in_bins = hidden.all(2), hidden[:, :50].all(1)
    assert int(in_time.sum(1).max()) <= 60 and int(in_time[1::2].sum(1).max()) <= 20
    assert int(in_bins.sum(1).max()) <= 16
    assert in_time.any(1).float().mean() > 0.8 and in_bins.any(1).float().mean() > 0.8
    assert not in_time[1::2, 50:].any(), "stripes of time lie within the utterance"
    blanked = in_time[:, :, None] | in_bins[:, None]
    assert torch.equal(hidden, blanked), "nothing but stripes"
    assert torch.equal(got, made(x, lengths, torch.Generator().manual_seed(0)))
    assert not torch.equal(got[0], got[2]), "each row has stripes of its own"


def test_stripes_have_every_width_at_every_place():
    """One of 0 … 3 frames in 10: each width a quarter of the time, and wherever it fits."""
    sizes, draw = torch.full((4000,), 10), torch.Generator().manual_seed(0)
    hidden = SpecAugment._stripes(sizes, torch.full((4000,), 3), 1, 10, draw)
    widths = hidden.sum(1)
    assert (torch.bincount(widths, minlength=4) / 4000 - 0.25).abs().max() < 0.03  # 4 deviations
    for width in (1, 2, 3):
        starts = torch.bincount(hidden[widths == width].int().argmax(1), minlength=10)
        expected = (widths == width).sum() / (11 - width)
        assert (starts[: 11 - width] - expected).abs().max() < 5 * expected**0.5 and starts[11 - width :].sum() == 0


def test_a_bin_without_sound_is_not_blown_up():
    """Its spread counts as a tenth at least; and rounding may make a variance of equal frames negative."""
    x = torch.tensor([[1.0], [1.02]])
    assert torch.allclose(scaled(x, torch.tensor([1.0]), torch.tensor([0.01])), (x - 1) / 0.1)
    levels = torch.linspace(0.1, 30, 200)
    running = Running(levels, torch.zeros(200), prior=1, horizon=20)
    assert running.push(levels.expand(300, -1)).abs().max() < 1e-4
