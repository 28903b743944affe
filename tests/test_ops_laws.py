"""What must hold between two calls of the operator, whatever the shapes, dtypes, maps and options.

Each law compares outputs, final states and all gradients. Kernels that are only non-negative run in float64, with a
tolerance that grows with Σ|w| / |den| (cases.any_case, cases.worsening).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from cases import Case, Results, any_case, assert_agree, assert_same, make_inputs, run, run_case, worsening
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn import State, linear_attention

few = settings(max_examples=30)
PER_TOKEN = ("q", "k", "v", "g")
PER_ROW = ("kv", "z", "g_kv", "g_z")


def rows(x: Results, index: list[int]) -> Results:
    return {name: tensor[index] for name, tensor in x.items()}


def is_token_wise(name: str) -> bool:
    return name in ("q", "k", "v", "g", "out", "dq", "dk", "dv")


@st.composite
def padded_case(draw) -> Case:
    """Rows of different lengths, empty ones among them; without causality the queries have lengths of their own."""
    case = draw(any_case(impl=draw(st.sampled_from(["quadratic", "chunked", "recurrent"]))))
    lengths = st.lists(st.integers(0, case.time), min_size=case.batch, max_size=case.batch)
    layout = {"lengths": draw(lengths)} | ({} if case.causal else {"q_lengths": draw(lengths)})
    return replace(case, layout=layout)


def ends_of(case: Case) -> dict[str, list[int]]:
    """Where the real tokens of each row end, for everything that has a time axis."""
    keys: list[int] = case.layout["lengths"]
    queries: list[int] = case.layout.get("q_lengths", keys)
    names = {"q": queries, "g": queries, "out": queries, "dq": queries}
    return names | {"k": keys, "v": keys, "dk": keys, "dv": keys}


def poison(x: Results, case: Case, names: Iterable[str]) -> Results:
    """NaN and infinities wherever a token is padding."""
    x = {name: tensor.clone() for name, tensor in x.items()}
    for name in names:
        for b, end in enumerate(ends_of(case)[name]):
            x[name][b, end:, ..., ::2] = torch.nan
            x[name][b, end:, ..., 1::2] = torch.inf
    return x


@few
@given(padded_case())
def test_a_batch_of_padded_rows_is_each_row_alone(case):
    """With NaN for padding, which reaches nothing; padding itself gives and gets 0."""
    x, ends = make_inputs(case), ends_of(case)
    together = run_case(case, poison(x, case, ("q", "k", "v")))
    for b in range(case.batch):
        alone = {name: t[[b], : ends[name][b]] if name in ends else t[[b]] for name, t in x.items()}
        got = {name: t[[b], : ends[name][b]] if name in ends else t[[b]] for name, t in together.items()}
        row = replace(case, batch=1, layout={})
        assert_agree(got, run_case(row, alone), worsening(row, alone))
        assert not any(together[name][b, ends[name][b] :].any() for name in together.keys() & ends.keys())


@few
@given(padded_case())
def test_a_cotangent_of_padding_reaches_nothing(case):
    """The gradient of a norm of padded outputs, which are 0, is NaN; a loss that masks them still sends it here."""
    x = make_inputs(case)
    assert_agree(run_case(case, poison(x, case, ("g",))), run_case(case, x))


@st.composite
def packed_case(draw) -> tuple[Case, list[int], list[int]]:
    case = draw(any_case(batch=1))
    num = draw(st.integers(1, 4))
    cuts = st.lists(st.integers(0, case.time), min_size=num - 1, max_size=num - 1).map(sorted)
    edges = [0, *draw(cuts), case.time]
    edges_q = edges if case.causal or draw(st.booleans()) else [0, *draw(cuts), case.time]
    layout = {"cu_seqlens": edges} | ({} if edges_q is edges else {"cu_seqlens_q": edges_q})
    return replace(case, layout=layout), edges, edges_q


@few
@given(packed_case())
def test_packed_sequences_are_separate_sequences(packed):
    case, edges, edges_q = packed
    x = make_inputs(case)
    together = run_case(case, x)
    for n in range(len(edges) - 1):
        keys, queries = slice(edges[n], edges[n + 1]), slice(edges_q[n], edges_q[n + 1])
        span = {"q": queries, "g": queries, "k": keys, "v": keys, "out": queries, "dq": queries, "dk": keys, "dv": keys}
        alone = {name: t[:, span[name]] if name in PER_TOKEN else t[[n]] for name, t in x.items()}
        got = {name: t[:, span[name]] if name in span else t[[n]] for name, t in together.items()}
        want = run_case(replace(case, layout={}), alone)
        assert_agree(got, want, worsening(replace(case, layout={}), alone))


@few
@given(packed_case(), st.data())
def test_a_sequence_of_nan_spoils_no_other(packed, data):
    """Nor do the tokens behind the last sequence, which are padding."""
    case, edges, edges_q = packed
    bad = data.draw(st.integers(0, len(edges) - 1))
    case = replace(case, layout={name: cuts[:-1] for name, cuts in case.layout.items()} if bad == 0 else case.layout)
    x = make_inputs(case)
    keys, queries = (slice(*(cuts[-2:] if bad == 0 else cuts[bad - 1 : bad + 1])) for cuts in (edges, edges_q))
    spoilt = {name: t.clone() for name, t in x.items()}
    for name, tokens in (("q", queries), ("g", queries), ("k", keys), ("v", keys)):
        spoilt[name][:, tokens] = torch.nan
    got, want = run_case(case, spoilt), run_case(case, x)
    inside = {"out": queries, "dq": queries, "dk": keys, "dv": keys}
    for result in (got, want):
        for name, t in result.items():
            if name in inside:
                assert bad or not t[:, inside[name]].any(), "padding gives and gets 0"
                t[:, inside[name]] = 0
            elif bad:
                t[bad - 1] = 0
    assert_agree(got, want)


def run_in_pieces(case: Case, x: Results, cuts: list[int]) -> Results:
    """The same results as `run_case`, from calls that each go on from the state of the one before."""
    names = ["q", "k", "v"] + (["kv"] + ["z"] * case.normalize) * case.stateful
    leaf = {name: x[name].detach().requires_grad_() for name in names}
    state = State(leaf["kv"], leaf.get("z")) if case.stateful else None
    outs = []
    for start, end in zip([0, *cuts], [*cuts, case.time], strict=True):
        piece = [leaf[name][:, start:end] for name in ("q", "k", "v")]
        out, state = linear_attention(*piece, state=state, return_state=True, **case.options)
        outs.append(out)
    assert state is not None
    made = {"out": torch.cat(outs, 1)} | {name: state.tensors()[name] for name in ("kv", "z")[: 1 + case.normalize]}
    cotangents = {"out": x["g"], "kv": x.get("g_kv"), "z": x.get("g_z")}
    pairs = [(made[name], cotangents[name]) for name in made if cotangents[name] is not None]
    grads = torch.autograd.grad([a for a, _ in pairs], list(leaf.values()), [b for _, b in pairs])
    return {name: t.detach() for name, t in made.items()} | {
        f"d{name}": grad for name, grad in zip(leaf, grads, strict=True)
    }


@few
@given(any_case(causal=True), st.lists(st.integers(0, 40), min_size=1, max_size=3))
def test_split_anywhere_and_go_on_is_the_whole(case, cuts):
    cuts = sorted(min(cut, case.time) for cut in cuts)
    x = make_inputs(case)
    assert_agree(run_in_pieces(case, x, cuts), run_case(case, x), worsening(case, x))


@few
@given(any_case(causal=True), st.data())
def test_the_future_changes_nothing(case, data):
    now = data.draw(st.integers(0, case.time))
    x = make_inputs(case)
    x["g"][:, now:] = 0
    other = {name: t.clone() for name, t in x.items()}
    for name in ("q", "k", "v"):
        other[name][:, now:] = 3 - 2 * other[name][:, now:]
    first, second = (run(y, stateful=case.stateful, watch=("out",), **case.options) for y in (x, other))
    assert torch.equal(first["out"][:, :now], second["out"][:, :now])
    for name in ("dq", "dk", "dv"):
        assert_same(name, first[name][:, :now], second[name][:, :now], worsening(case, x))
        assert not first[name][:, now:].any(), "the past does not depend on the future: its gradient there is 0"


@few
@given(any_case(causal=True), st.data())
def test_the_beginning_is_the_answer_to_the_beginning(case, data):
    now = data.draw(st.integers(0, case.time))
    x = make_inputs(case)
    x["g"][:, now:] = 0
    beginning = x | {name: x[name][:, :now] for name in PER_TOKEN}
    whole, part = (run(y, stateful=case.stateful, watch=("out",), **case.options) for y in (x, beginning))
    got = {name: t[:, :now] if is_token_wise(name) else t for name, t in whole.items() if name not in ("kv", "z")}
    assert_agree(got, {name: part[name] for name in got}, worsening(case, x))


@few
@given(padded_case(), st.randoms(use_true_random=False))
def test_permuting_the_batch_permutes_everything(case, random):
    order = random.sample(range(case.batch), case.batch)
    x = make_inputs(case)
    layout = {name: [ends[b] for b in order] for name, ends in case.layout.items()}
    got = run_case(replace(case, layout=layout), rows(x, order))
    assert_agree(got, rows(run_case(case, x), order), worsening(replace(case, layout={}), x))


@few
@given(any_case(causal=False), st.randoms(use_true_random=False))
def test_without_causality_the_order_of_the_keys_is_nothing(case, random):
    order = random.sample(range(case.time), case.time)
    x = make_inputs(case)
    got = run_case(case, x | {"k": x["k"][:, order], "v": x["v"][:, order]})
    want = run_case(case, x)
    want |= {"dk": want["dk"][:, order], "dv": want["dv"][:, order]}
    assert_agree(got, want, worsening(case, x))


@few
@given(any_case())
def test_grouped_heads_are_repeated_heads(case):
    share = case.heads // case.kv_heads
    x = make_inputs(case)
    wide = x | {name: x[name].repeat_interleave(share, dim=2) for name in ("k", "v")}
    wide |= {name: x[name].repeat_interleave(share, dim=1) for name in PER_ROW if name in x}
    watch = ("out",)
    grouped, repeated = (run(y, stateful=case.stateful, watch=watch, **case.options) for y in (x, wide))
    for name in ("out", "dq"):
        assert_same(name, grouped[name], repeated[name], worsening(case, x))
    for name in ("kv", "z")[: 1 + case.normalize]:
        assert_same(name, grouped[name].repeat_interleave(share, dim=1), repeated[name])


@few
@given(any_case(normalize=True, stateful=False), st.floats(-4, 4, width=16))
def test_a_mean_of_equal_values_is_that_value(case, value):
    """v ≡ c gives out ≡ c, to the rounding of the output, wherever anything is seen; then q changes nothing."""
    x = make_inputs(case)
    x["v"] = torch.full_like(x["v"], value)
    value = x["v"].flatten()[0].item()  # as the dtype holds it
    got = run_case(case, x, watch=("out",))
    rounding = torch.finfo(case.sums).eps * 32 * worsening(case, x)
    seen = got["out"] != 0
    error = (got["out"].double() - value).abs()[seen]
    assert (error <= (rounding + torch.finfo(case.dtype).eps) * abs(value)).all()
    if value and case.feature_map in ("elu", "softplus", "exp", "taylor"):
        assert seen.all(), "positive kernels always see something"
    assert got["dq"].abs().max() <= 32 * rounding * max(abs(value), 1e-3)


@few
@given(any_case(), st.sampled_from([0.5, -2.0]))
def test_outputs_are_linear_in_values_and_state(case, factor):
    """A power of two commutes with rounding: bit for bit."""
    x = make_inputs(case)
    scaled = x | {name: factor * x[name] for name in ("v", "kv") if name in x}
    got, want = run_case(case, scaled, watch=("out",)), run_case(case, x, watch=("out",))
    tiny = torch.finfo(case.dtype).tiny  # below it fp16 rounds otherwise
    for name in ("out", "kv"):
        close = (got[name] == factor * want[name]) | (want[name].abs() < 4 * tiny)
        assert close.all(), name


@few
@given(any_case(feature_map="exp", normalize=True, dtype=torch.float64), st.floats(-1, 1))
def test_a_shift_of_a_query_cancels(case, shift):
    """exp(q + c)·φ(k) = exp(c) exp(q)·φ(k): one factor in the sum and in its normaliser."""
    x = make_inputs(case)
    assert_agree(run_case(case, x | {"q": x["q"] + shift}), run_case(case, x))
