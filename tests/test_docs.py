"""The documents are true: what they show as Python runs, and what they link to exists.

The ```python fences of a page run from top to bottom in one namespace, as a reader would type them. A fence that cannot
run here says so, and why, in a comment on the line above it:  <!-- not run: needs a GPU -->
"""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md")) + sorted(ROOT.glob("benchmarks/**/*.md"))
SOURCES = sorted((ROOT / "linattn").rglob("*.py"))

FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
EXCUSE = re.compile(r"<!-- not run: \S.* -->\n\Z")
LINK = re.compile(r"""\]\(<?([^)\s>]+)|(?:src|href)="([^"]+)""")


class Snippet(NamedTuple):
    line: int  # of its first line, from 1
    source: str


def snippets(text: str) -> list[Snippet]:
    """The ```python fences of a page that are to run."""
    found = []
    for fence in FENCE.finditer(text):
        indent, language, options, body = fence.groups()
        if language != "python" or EXCUSE.search(text[: fence.start()]):
            continue
        assert not options.strip(), f"```python{options}: an option says nothing here, <!-- not run: why --> does"
        line = text.count("\n", 0, fence.start(4)) + 1
        found.append(Snippet(line, re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)))
    return found


def run_page(page: Path) -> None:
    """Runs the page's snippets; a traceback points at the line of the page."""
    namespace = {"__name__": "__main__"}
    for line, source in snippets(page.read_text()):
        exec(compile("\n" * (line - 1) + source, str(page), "exec"), namespace)


def dead_links(page: Path, root: Path) -> list[str]:
    """Relative links to files that are not there, or to headings that the file does not have."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    dead = []
    for link in (a or b for a, b in LINK.findall(text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        there = target.exists() and target.is_relative_to(root)
        if not there or (heading and heading not in headings(target)):
            dead.append(link)
    return dead


def headings(page: Path) -> set[str]:
    """The anchors of a page, spelt as GitHub spells them."""
    titles = re.findall(r"^#+ +(.*?) *$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def examples(source: Path) -> list[doctest.DocTest]:
    """The >>> examples of a module's docstrings. Read from the source: doctest's own finder does not see functions
    that a decorator wraps, and under the tests all of them are wrapped."""
    found = []
    tree = ast.parse(source.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and ">>>" in docstring:
                line = getattr(node, "lineno", 1)
                name = f"{source.stem}.{getattr(node, 'name', '')}"
                found.append(doctest.DocTestParser().get_doctest(docstring, {}, name, str(source), line))
    return found


def run_examples(found: list[doctest.DocTest], namespace: dict) -> str:
    """Runs them, each in its own copy of the namespace; the report of what failed, "" where all is well."""
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    for example in found:
        example.globs = dict(namespace)
        runner.run(example, out=report.append)
    assert runner.tries >= len(found), "an example without a single line to run"
    return "".join(report)


def given() -> dict:
    """What examples may use without saying where it comes from: torch, and q, k, v of shape (B T H D)."""
    q, k, v = torch.randn(3, 2, 16, 4, 8, generator=torch.Generator().manual_seed(0))
    return {"torch": torch, "q": q, "k": k, "v": v}


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(autouse=True)
def _leave_no_trace(tmp_path, monkeypatch):
    """Snippets write where they like, and seed what they like."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page.read_text())], ids=shown)
def test_snippets_run(page):
    run_page(page)


@pytest.mark.parametrize("source", [source for source in SOURCES if examples(source)], ids=shown)
def test_docstring_examples_run(source):
    module = importlib.import_module(".".join(source.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    report = run_examples(examples(source), {**given(), **vars(module)})
    assert not report, report


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_lead_somewhere(page):
    assert dead_links(page, ROOT) == []


def test_a_false_snippet_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2, 'false'\n```\n")
    with pytest.raises(AssertionError, match="false") as caught:
        run_page(page)
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno + 1) == (str(page), 10)


def test_a_snippet_that_warns_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nimport warnings\nwarnings.warn('deprecated')\n```\n")
    with pytest.raises(UserWarning, match="deprecated"):
        run_page(page)


def test_a_snippet_is_excused_with_a_reason_only():
    fence = "```python\n1 / 0\n```\n"
    assert snippets("<!-- not run: needs a GPU -->\n" + fence) == []
    assert snippets("<!-- not run: needs a GPU -->\n\ntext\n\n" + fence) != []
    assert snippets("<!-- not run: -->\n" + fence) != []
    with pytest.raises(AssertionError, match="not run: why"):
        snippets("```python no-run\n1 / 0\n```\n")
    assert [s.source for s in snippets("- item\n\n  ```python\n  x = 1\n  ```\n")] == ["x = 1\n"]


def test_a_false_example_is_seen(tmp_path):
    source = tmp_path / "module.py"
    source.write_text(
        'def f():\n    """F.\n\n    >>> 1 + 1\n    3\n    """\n\nclass C:\n    """>>> q.shape[0]\n    2\n    """\n'
    )
    assert len(examples(source)) == 2
    assert run_examples(examples(source), given()).count("Failed example:") == 1


def test_a_dead_link_is_seen(tmp_path):
    (tmp_path / "other.md").write_text("# A heading, `spelt` so\n")
    page = tmp_path / "page.md"
    live = "[a](other.md) [b](other.md#a-heading-spelt-so) [c](https://example.org/x.md) ![d](<other.md>) `[e](no.md)`"
    page.write_text(f"# Top\n{live} [f](#top)\n```text\n[g](no.md)\n```\n")
    assert dead_links(page, tmp_path) == []
    page.write_text('[a](gone.md) [b](other.md#gone) [c](#gone) <img src="gone.png"> [d](../outside.md)\n')
    assert dead_links(page, tmp_path) == ["gone.md", "other.md#gone", "#gone", "gone.png", "../outside.md"]
