"""The sections of the study's page, each from the numbers: markdown, "" where there is nothing to say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from linattn.bench.report import seconds_in_words
from linattn.study import conclude
from linattn.study.arms import LINEAR, REFORMER, SOFTMAX, label
from linattn.study.conclude import TASKS, Entry, Race, Verdict, apart, entries, ranked, shown, verdict
from linattn.study.jobs import PARTS, Study
from linattn.study.numbers import Interval
from linattn.study.plan import head_width
from linattn.study.sizes import SIZES

Plots = dict[str, str]
LOADS = {"one": "one sequence", "many": "a full batch"}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def bullets(lines: Iterable[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def picture(plots: Plots, name: str, words: str) -> str:
    return f"![{words}]({plots[name]})\n" if name in plots else ""


def names(found: Iterable[Entry], widths: bool) -> str:
    """Of entries, with the head width where several were tried; none is said in words."""
    made = ", ".join(f"{label(e.arm)}" + (f" at {e.head_width}" if widths else "") for e in found)
    return made or "none"


DECISIONS = """## Decision table

A figure in brackets is a 95% interval over seeds (or, where said, over texts). Two that overlap are *not told apart*,
whatever their means: then the line says so. A *hint* is less: seed by seed, on the same data in the same order, one map
was better than elu, and the interval of that difference leaves out 0.

"""


def decisions(study: Study) -> str:
    rows = [decision(study, task) for task in TASKS]
    rows += [copy_decision(study), short_decision(study), long_decision(study)]
    head = ("your task looks like", "take", "head width", "the figures behind it")
    return DECISIONS + table(head, [row for row in rows if row])


def decision(study: Study, task: str) -> tuple[str, ...] | None:
    if not entries(study, task, "screen") and not entries(study, task, "final"):
        return None
    meta, made = TASKS[task], verdict(study, task)
    if made is None:
        return meta.looks_like, "not known yet", "-", "no finals with several seeds were recorded"
    best = made.best
    widths = {entry.head_width for entry in (best, *made.alike, *made.worse)}
    if made.nothing_apart and made.default is not None:
        take = f"`{LINEAR}`, the default: no map was told apart{hinted(task, made)}"
        return meta.looks_like, take, width_advice(made, made.default), evidence(task, made)
    take = f"`{best.arm}`"
    if made.alike:
        take += f" (not told apart: {names(made.alike, len(widths) > 1)})"
    return meta.looks_like, take, width_advice(made, best), evidence(task, made)


def hinted(task: str, made: Verdict) -> str:
    """What the best map's gain over elu hints at, "" where it hints at nothing."""
    if made.default is None or made.default is made.best:
        return ""
    lead = conclude.gain(made.best, made.default, TASKS[task].higher)
    if lead is None or lead.mean <= 0 or not conclude.hint(lead):
        return ""
    return f" (a hint: seed by seed `{made.best.arm}` is better, by {score(task, lead)})"


def width_advice(made: Verdict, taken: Entry) -> str:
    """Which head width, for the map that is taken: only what intervals tell apart."""
    everybody = [made.best, *made.alike, *made.worse]
    if {entry.head_width for entry in everybody} == {taken.head_width}:
        return f"{taken.head_width}, the only one tried"
    same = [entry for entry in everybody if entry.arm == taken.arm and entry is not taken]
    if not same:
        return f"{taken.head_width}; others not measured for this map"
    alike = [entry.head_width for entry in same if not apart(entry.score, taken.score)]
    if not alike:
        return f"{taken.head_width}, told apart from {', '.join(str(entry.head_width) for entry in same)}"
    return f"{taken.head_width} or {', '.join(map(str, alike))}: not told apart"


def evidence(task: str, made: Verdict) -> str:
    """The best map, elu and softmax attention, in the task's unit."""
    meta, said = TASKS[task], []
    said.append(f"{meta.unit}: {made.best.arm} {score(task, made.best.score)}")
    if made.default is not None and made.default is not made.best:
        said.append(f"{LINEAR} {score(task, made.default.score)}")
    if made.softmax is not None:
        outcome = {
            "better": "linear is better than softmax attention",
            "worse": "softmax attention is better",
            "not told apart": "not told apart from softmax attention",
        }[made.against_softmax]
        said.append(f"{outcome}, {score(task, made.softmax.score)}")
    return "; ".join(said)


def score(task: str, value: Interval) -> str:
    return shown(value, 2 if TASKS[task].unit == "accuracy" else 3)


def copy_decision(study: Study) -> tuple[str, ...] | None:
    found = conclude.copies(study)
    lengths = [length for length, arms in found.items() if {LINEAR, SOFTMAX} <= arms.keys()]
    if not lengths:
        return None
    length = max(lengths)
    linear, softmax = found[length][LINEAR][0], found[length][SOFTMAX][0]
    outcome = conclude.compared(linear, softmax, higher=False)
    take = {
        "better": "`elu`",
        "worse": "softmax attention",
        "not told apart": "not told apart: `elu`, softmax attention",
    }
    figures = f"bits a symbol at length {length}: elu {shown(linear)}, softmax attention {shown(softmax)}"
    width = f"{SIZES[study.scale].copy.head_width}, the only one tried"
    return "copying word for word", take[outcome], width, figures


def short_decision(study: Study) -> tuple[str, ...] | None:
    races = [race for race in conclude.races(study) if race.level == "layer" and race.mode == "training"]
    if not races:
        return None
    said = [f"{where(race)}: {pays(race)}" for race in races]
    figures = "; ".join(said) + " (a layer with gradients, times without an interval)"
    return "short sequences", "by length", f"{SIZES[study.scale].short.shape[1]}, the only one timed", figures


def long_decision(study: Study) -> tuple[str, ...] | None:
    found = [one for one in conclude.far(study) if one.arm not in (SOFTMAX, REFORMER)]
    if not found:
        return None
    best = min(found, key=lambda one: one.last.mean)
    take = f"`{best.arm}`, rotary {best.rotary}, the state carried on"
    if best.says != "helps":
        take = "windows of the trained length: carrying the state further was not seen to help"
    figures = "; ".join(f"{one.arm}, rotary {one.rotary}: {shown(one.last)} ({one.says})" for one in found)
    width = f"{head_width(SIZES[study.scale])}, the only one tried"
    window = SIZES[study.scale].lengths.window
    return (
        f"streams far longer than training ({window})",
        take,
        width,
        f"bits a byte against windows, over texts: {figures}",
    )


SURPRISES = """## Surprises

By rule: a linear map told apart from softmax attention as better, the default told apart as worse than another map, a
loss that became infinite, reading on that does harm.

"""


def surprises(study: Study) -> str:
    found = conclude.surprises(study)
    return SURPRISES + (bullets(found) if found else "None of these occurred, or the intervals were too wide to say.\n")


# Tasks


def tasks(study: Study, plots: Plots) -> list[str]:
    return [text for task in TASKS if (text := task_section(study, task, plots))]


def task_section(study: Study, task: str, plots: Plots) -> str:
    screen = ranked(entries(study, task, "screen"), task)
    if not screen:
        return ""
    meta, about = TASKS[task], about_task(study, task)
    head = ("map", "head width", "state, bytes", f"screen, {meta.unit}", "finals, new seeds", "better than elu by")
    final = {(entry.arm, entry.head_width): entry for entry in entries(study, task, "final")}
    rows = [task_row(task, entry, final) for entry in screen]
    text = f"## {meta.title}\n\n{about}\n"
    if task == "recall":
        text += picture(plots, "recall", "Accuracy of recall over bytes of state, for every map")
    text += picture(plots, f"task-{task}", f"{meta.title}: screen and finals") + "\n"
    return text + bullets(task_lines(study, task)) + "\n" + table(head, rows)


def task_row(task: str, entry: Entry, final: dict[tuple[str, int], Entry]) -> tuple[object, ...]:
    """One arm at one head width: its state, the screen, and its finals where it has them."""
    judged, elu = final.get((entry.arm, entry.head_width)), final.get((LINEAR, entry.head_width))
    lead = None if judged is None or elu is None or judged is elu else conclude.gain(judged, elu, TASKS[task].higher)
    return (
        label(entry.arm),
        entry.head_width,
        "-" if entry.state_bytes is None else f"{entry.state_bytes:,}",
        f"{entry.score.mean:.3f}",
        "" if judged is None else shown(judged.score),
        "" if lead is None else shown(lead) + (" (hint)" if conclude.hint(lead) else ""),
    )


def about_task(study: Study, task: str) -> str:
    """The budget, as it was recorded."""
    found = study.of(task.partition("-")[0], task=task, stage="screen")
    made = next((result["found"] for result in found if "steps" in result["found"]), None)
    if made is None:
        return ""
    tokens = f", {made['tokens']:,} values seen" if "tokens" in made else ""
    parameters = sorted({result["found"]["parameters"] for result in found if "parameters" in result["found"]})
    between = f"{parameters[0]:,}" + (f" to {parameters[-1]:,}" if len(parameters) > 1 else "")
    better = "Higher" if TASKS[task].higher else "Lower"
    return f"{made['data']}: {made['steps']:,} updates{tokens}, {between} parameters. {better} is better.\n"


def task_lines(study: Study, task: str) -> list[str]:
    """What can be said of a task."""
    made, lines = verdict(study, task), []
    if made is None:
        lines.append("One seed of each: an order, and no evidence of a difference. The finals are still to come.")
    else:
        widths = len({entry.head_width for entry in (made.best, *made.alike, *made.worse)}) > 1
        lines.append(
            f"Best of the finals' linear maps by its mean: {names([made.best], widths)}, {shown(made.best.score)}."
        )
        lines.append(f"Not told apart from it: {names(made.alike, widths)}.")
        lines.append(f"Told apart, as worse: {names(made.worse, widths)}.")
        if made.softmax is not None:
            lines.append(f"Softmax attention: {shown(made.softmax.score)}. {against(made)}")
    gap = conclude.twins_differ(study, task)
    if gap is not None:
        lines.append(
            f"`quadratic` and `quadratic_symmetric` are one kernel in two forms; in the screen they came out "
            f"{gap:.3f} apart, by rounding alone."
        )
    return lines


def against(made: Verdict) -> str:
    return {
        "better": "The best linear map is told apart from it, as better.",
        "worse": "It is told apart from the best linear map, as better.",
        "not told apart": "Not told apart from the best linear map.",
    }[made.against_softmax]


# Copying, short, lengths, scaling


COPYING = """## The copy task

A word of random symbols, a separator, the word again: can attention address sharply? Bits a symbol of the second word,
of which guessing costs 3.32 and knowing 0.

"""


def copying(study: Study, plots: Plots) -> str:
    found = conclude.copies(study)
    if not found:
        return ""
    rows = [
        (length, label(arm), shown(bits), shown(right, 2))
        for length, arms in found.items()
        for arm, (bits, right) in arms.items()
    ]
    lines = []
    for length, arms in found.items():
        if {LINEAR, SOFTMAX} <= arms.keys():
            outcome = conclude.compared(arms[LINEAR][0], arms[SOFTMAX][0], higher=False)
            words = {"not told apart": "not told apart from", "better": "better than", "worse": "worse than"}[outcome]
            lines.append(f"Length {length}: linear attention (elu) is {words} softmax attention.")
    text = COPYING
    text += picture(plots, "copy", "The copy task: loss over updates") + "\n" + bullets(lines) + "\n"
    return text + table(("length", "attention", "bits a symbol", "accuracy"), rows)


TIMES = """\
Time of linear attention (elu) over that of softmax (SDPA), by tokens: below 1 linear is faster. Both took turns in one
race; these ratios have no interval.

"""


def short(study: Study, plots: Plots) -> str:
    races, quality = conclude.races(study), conclude.short_quality(study)
    if not races and not quality:
        return ""
    text = "## Short sequences\n\n"
    if races:
        lengths = sorted({tokens for race in races for tokens in race.tokens})
        rows = [
            (where(race), race.level, race.mode, *(ratio_at(race, tokens) for tokens in lengths), pays(race))
            for race in races
        ]
        head = ("where", "what", "mode", *(f"{tokens:,}" for tokens in lengths), "linear pays")
        text += TIMES
        text += picture(plots, "short", "Time of linear over softmax by length") + "\n" + table(head, rows) + "\n"
    if quality:
        text += quality_table(quality)
    return text


def where(race: Race) -> str:
    return f"{race.device}, {race.form}, {LOADS[race.load]}"


def ratio_at(race: Race, tokens: int) -> str:
    return f"{race.ratios[race.tokens.index(tokens)]:.2f}" if tokens in race.tokens else "-"


def pays(race: Race) -> str:
    """Where linear attention is faster, as far as was measured."""
    if race.pays_from is None:
        return f"not up to {race.tokens[-1]:,}"
    if race.pays_from == race.tokens[0]:
        return f"from {race.pays_from:,}, the shortest measured"
    return f"from {race.pays_from:,}"


def quality_table(quality: dict[int, dict[str, Interval]]) -> str:
    rows = []
    for window, arms in quality.items():
        linear, softmax = arms.get(LINEAR), arms.get(SOFTMAX)
        if linear is not None and softmax is not None:
            outcome = conclude.compared(linear, softmax, higher=False)
            rows.append((window, shown(linear), shown(softmax), f"linear: {outcome}"))
    text = "Bits a byte of text after training at T, as many bytes each, read in windows of T:\n\n"
    return text + table(("T", "elu", "softmax attention", "told apart?"), rows)


FAR = """## Far beyond the trained length

Trained on text in windows of {window}, then read on to {end} bytes with the state carried all the way. Beside it the
same bytes with half a window to a whole one of context, as in training. Below 0, what lies further back helps; above,
carrying it on does harm. The intervals are over stretches of text, in places {last}.

"""


def lengths(study: Study, plots: Plots) -> str:
    found = conclude.far(study)
    if not found:
        return ""
    size = SIZES[study.scale].lengths
    last = found[0].edges[-2:]
    text = FAR.format(window=size.window, end=f"{found[0].edges[-1]:,}", last=f"{last[0]:,} to {last[1]:,}")
    rows = [
        (
            label(one.arm),
            one.rotary,
            *(f"{x:.3f}" for x in one.carried),
            f"{one.last.mean:+.3f} [{one.last.low:+.3f}, {one.last.high:+.3f}]" if one.last.known else "-",
            one.says,
        )
        for one in found
    ]
    head = ("attention", "rotary", *(f"to {edge:,}" for edge in found[0].edges[1:]), "carried - windows", "carrying on")
    return text + picture(plots, "lengths", "Bits a byte by place") + "\n" + table(head, rows)


SCALING = """## Scaling

Forward and backward of one attention, seconds and peak memory of a sequence by its length N; the batch shrinks as N
grows. Exponents b of N^b by least squares, with the interval of the slope.

"""


def scaling(study: Study, plots: Plots) -> str:
    found = conclude.scalings(study)
    if not found:
        return ""
    text = SCALING
    rows = [
        (
            one.device,
            label(one.arm),
            f"{one.tokens[0]:,} … {one.tokens[-1]:,}" if one.tokens else "-",
            seconds_in_words(one.seconds[-1]) if one.seconds else "-",
            "-" if one.time_exponent is None else shown(one.time_exponent, 2),
            "-" if one.memory_exponent is None else shown(one.memory_exponent, 2),
            one.stopped or "",
        )
        for one in found
    ]
    head = ("device", "attention", "N", "seconds at the last", "exponent of time", "of memory", "stopped")
    return text + picture(plots, "scaling", "Time and memory by length") + "\n" + table(head, rows)


# How it was made


METHOD = """## How it was made

- **Equal parameters.** Maps with weights of their own (`hedgehog`, `t2r`, `learned_elu`) pay for them by a narrower
  feed-forward part. The state is not equal: its bytes stand beside each result, as this library keeps it (sums with
  their low parts; for softmax attention, keys and values of a whole sequence).
- **One budget, one learning rate** for everybody in a task: a map that needs another one is at a disadvantage, and a
  low score may mean slow rather than unable.
- **The screen** is one seed, judged on dev. It chooses the four best maps (of two forms of one kernel, one); elu and
  softmax attention are always in. **The finals** have {seeds} seeds that the screen has not seen, judged on test, so
  that what was lucky in the screen is not lucky twice.
- **Intervals** are Student's t over seeds: initial weights and the order of the data, not the choice of the test set
  nor of the learning rate. With three seeds they are wide. Those of an accuracy end at 0 and at 1.
- **Hints** compare seed by seed: runs of one seed see the same data in the same order. There is one comparison for
  every map of the finals, and by chance alone one in twenty of them leaves out 0.
- **`identity`** is not normalised; **`fourier`** is, with its divisor held off zero by 0.1.
- Recall and copying have a convolution over two neighbours (or four) before attention: what is compared is memory and
  addressing, not how fast a model learns what stands beside what.
"""


def method(study: Study) -> str:
    return METHOD.format(seeds=len(SIZES[study.scale].final_seeds))


def left_out(study: Study) -> str:
    lines = [f"{part}: {why.splitlines()[0]}" for part, why in study.missing.items()]
    lines += [f"{job} failed: {why}" for job, why in study.failed.items()]
    if study.scale == "quick":
        lines.append("speech, compiled forms, lengths beyond a few thousand and a GPU are in the full study only")
    done = {result["part"] for result in study.results.values()}
    known = {*done, *study.missing, *(("speech",) if study.scale == "quick" else ())}
    lines += [f"{part}: not measured" for part in PARTS if part not in known]
    return "## Left out\n\n" + bullets(lines) if lines else ""
