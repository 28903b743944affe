"""Imports go down only. The graph is read from the source, so that imports inside functions count as well."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import linattn

ROOT = Path(__file__).parents[1]

# The rooms of linattn, from the ground up. A module imports from its own room and from rooms below; rooms on one floor
# do not know each other. "" is linattn/__init__.py, the public names: what uses the library whole stands above it.
FLOORS = (
    ("_typing",),
    ("state",),
    ("features",),
    ("ops",),
    ("nn", "audio"),
    ("models",),
    ("generate", "train", "convert", "hf"),
    ("transcribe",),
    ("",),
    ("serve",),
    ("bench",),
    ("study",),
    ("cli", "experiments"),
    ("demo",),
    ("__main__",),
)
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}

Graph = dict[str, set[str]]  # a module's dotted name -> the modules it imports


def import_graph(folder: Path) -> Graph:
    """Who imports whom among the modules of the package in `folder`."""
    files = {dotted_name(file, folder): file for file in sorted(folder.rglob("*.py"))}
    return {
        name: {
            target for written in imported_names(file, name) if (target := resolve(written, set(files), folder.name))
        }
        for name, file in files.items()
    }


def dotted_name(file: Path, folder: Path) -> str:
    parts = file.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(file: Path, module: str) -> list[str]:
    """All that a file imports, wherever in it: `a.b` for `import a.b`, `a.b.c` for `from a.b import c`."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names = []
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "__import__",
            "import_module",
            "importlib.import_module",
        ):
            names += [
                arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            ]
    return names


def resolve(name: str, modules: set[str], package: str) -> str | None:
    """The module that an imported name is, or lies in; None outside the package."""
    if name.partition(".")[0] != package:
        return None
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return name


def room(module: str) -> str:
    return (module.split(".") + [""])[1]


def wrong_arrows(graph: Graph) -> list[str]:
    """Modules in no room, and imports that do not go down."""
    lost = [f"{module} is in no room: FLOORS names them all" for module in graph if room(module) not in FLOOR]
    arrows = [(a, b) for a in sorted(graph) for b in sorted(graph[a]) if {room(a), room(b)} <= FLOOR.keys()]
    return lost + [f"{a} imports {b}" for a, b in arrows if room(a) != room(b) and FLOOR[room(a)] <= FLOOR[room(b)]]


def cycle(graph: Graph) -> list[str]:
    """The modules of one import cycle, [] where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_imports_go_down_only():
    graph = import_graph(ROOT / "linattn")
    assert "linattn" in graph and "linattn._typing" in graph
    assert wrong_arrows(graph) == []
    assert cycle(graph) == []


@pytest.mark.parametrize(
    "source",
    [
        "import linattn.nn.block",
        "import linattn.nn.block as block",
        "from linattn.nn import block",
        "from linattn.nn.block import Block",
        "from ..nn import block",
        "from ..nn.block import Block",
        "from .. import nn",
        "def late():\n    from linattn.nn import block",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import linattn.nn.block",
        "import importlib\nimportlib.import_module('linattn.nn.block')",
        "from linattn import Block",
    ],
)
def test_an_upward_arrow_is_seen(tmp_path, source):
    write(tmp_path, {"linattn/nn/block.py": "", "linattn/ops/attention.py": source})
    assert len(wrong_arrows(import_graph(tmp_path / "linattn"))) == 1


@pytest.mark.parametrize(
    "source", ["from linattn.ops import attention", "from ..ops.attention import f", "import torch.nn"]
)
def test_a_downward_arrow_is_allowed(tmp_path, source):
    write(tmp_path, {"linattn/nn/block.py": source, "linattn/ops/attention.py": ""})
    assert wrong_arrows(import_graph(tmp_path / "linattn")) == []


def test_neighbours_do_not_know_each_other(tmp_path):
    write(tmp_path, {"linattn/hf.py": "from linattn import convert", "linattn/convert.py": ""})
    assert wrong_arrows(import_graph(tmp_path / "linattn")) == ["linattn.hf imports linattn.convert"]


def test_a_module_in_no_room_is_seen(tmp_path):
    write(tmp_path, {"linattn/misc/utils.py": ""})
    assert [line.split()[0] for line in wrong_arrows(import_graph(tmp_path / "linattn"))] == [
        "linattn.misc",
        "linattn.misc.utils",
    ]


def test_a_cycle_is_seen(tmp_path):
    write(
        tmp_path,
        {"linattn/ops/a.py": "from linattn.ops import b", "linattn/ops/b.py": "def f():\n    from .a import x"},
    )
    graph = import_graph(tmp_path / "linattn")
    assert wrong_arrows(graph) == []
    assert set(cycle(graph)) == {"linattn.ops.a", "linattn.ops.b"}


def write(folder: Path, sources: dict[str, str]) -> None:
    """The files, and an empty __init__.py in each folder on the way."""
    for name, source in sources.items():
        file = folder / name
        for package in list(Path(name).parents)[:-1]:
            (folder / package).mkdir(parents=True, exist_ok=True)
            (folder / package / "__init__.py").touch()
        file.write_text(source)


def test_the_package_only_re_exports():
    tree = ast.parse((ROOT / "linattn" / "__init__.py").read_text())
    assert ast.get_docstring(tree), "linattn/__init__.py opens with what the library is"
    for node in tree.body[1:]:
        names = [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
        allowed = isinstance(node, ast.Import | ast.ImportFrom) or names in (["__all__"], ["__version__"])
        assert allowed, f"linattn/__init__.py holds imports, __all__ and __version__, not: {ast.unparse(node)}"
    assert all(hasattr(linattn, name) for name in linattn.__all__)


def test_the_versions_agree():
    declared = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared and linattn.__version__ == declared[1]


def test_importing_linattn_brings_in_no_more_than_it_needs():
    """torch, and safetensors for states on disk: not what only the command line, the plots or the tests use."""
    report = "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    script = f"import json, sys, torch; {report}; import linattn; {report}"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    before, after = (set(json.loads(line)) for line in run.stdout.splitlines())
    assert after - before - sys.stdlib_module_names <= {"linattn", "safetensors"}
