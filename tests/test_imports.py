"""Imports point one way: batchrun -> jobs, engine, prefix_cache; engine -> prefix_cache, kernels; the rest nothing of ours."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("batchrun", "engine", "jobs", "kernels", "prefix_cache")
MAY_IMPORT = {
    "batchrun": {"batchrun", "jobs", "engine", "prefix_cache"},
    "engine": {"engine", "prefix_cache", "kernels"},
    "jobs": {"jobs"},
    "kernels": {"kernels"},
    "prefix_cache": {"prefix_cache"},
}
LIBRARIES = {"prefix_cache": {"numpy", "xxhash"}, "kernels": {"torch", "triton", "numpy"}}
"""What these two may use beside the standard library."""


class Import(NamedTuple):
    module: str
    """Dotted, absolute."""
    line: int


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Every import statement anywhere in the source, and importlib.import_module with a literal name.

    Args:
        package: dotted name of the package that the source lies in, to resolve relative imports.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from (Import(name, node.lineno) for name in names if isinstance(name, str))


def part_of(module: str) -> str | None:
    """Which of our folders a dotted name belongs to; None for a library."""
    first, _, rest = module.partition(".")
    if first == "batchrun":
        second = rest.partition(".")[0]
        return second if second in FOLDERS else "batchrun"
    return None


def violations(source: str, folder: str, package: str) -> list[str]:
    """What the source imports against the rules, as lines that name it."""
    found = []
    for module, line in imports_of(source, package):
        part = part_of(module)
        top = module.partition(".")[0]
        if part is not None and part not in MAY_IMPORT[folder]:
            found.append(f"line {line}: {folder} must not import {module}")
        elif top in FOLDERS and top != "batchrun":
            found.append(f"line {line}: import batchrun.{top}, not {top}")
        elif part is None and folder in LIBRARIES and top not in LIBRARIES[folder] | sys.stdlib_module_names:
            found.append(f"line {line}: {folder} must not use {top}")
    return found


def sources(folder: str) -> Iterator[Path]:
    """The folder's own Python files, without those behind links."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        if not any(parent.is_symlink() for parent in path.parents if parent != ROOT and ROOT in parent.parents):
            yield path


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_one_way(folder: str) -> None:
    files = list(sources(folder))
    assert files, f"no Python file under {folder}"
    found = []
    for path in files:
        inside = path.parent.relative_to(ROOT).parts
        package = ".".join(inside if folder == "batchrun" else ("batchrun", *inside))
        found += [f"{path.relative_to(ROOT)}, {text}" for text in violations(path.read_text(encoding="utf-8"), folder, package)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("folder", "package", "source"),
    [
        ("prefix_cache", "batchrun.prefix_cache", "from batchrun.engine import sequence"),
        ("prefix_cache", "batchrun.prefix_cache", "def f():\n    import torch"),
        ("kernels", "batchrun.kernels", "from batchrun.prefix_cache.radix import Node"),
        ("kernels", "batchrun.kernels", "from batchrun import __version__"),
        ("jobs", "batchrun.jobs", "import batchrun.engine.engine"),
        ("engine", "batchrun.engine", "from batchrun.options import RunOptions"),
        ("engine", "batchrun.engine.models", "from ...batchrun import errors"),
        ("engine", "batchrun.engine", "from .. import errors"),
        ("engine", "batchrun.engine", "from batchrun import pipeline"),
        ("engine", "batchrun.engine", "import kernels.ops"),
        ("batchrun", "batchrun.cli", "from batchrun.kernels import ops"),
        ("batchrun", "batchrun.cli", "import importlib\nimportlib.import_module('batchrun.kernels.ops')"),
        ("batchrun", "batchrun", "from prefix_cache import trie"),
    ],
)
def test_a_planted_import_against_the_direction_is_found(folder: str, package: str, source: str) -> None:
    assert len(violations(source, folder, package)) == 1


@pytest.mark.parametrize(
    ("folder", "package", "source"),
    [
        ("engine", "batchrun.engine", "import batchrun.prefix_cache.radix\nfrom batchrun.kernels import ops\nimport torch"),
        ("engine", "batchrun.engine.models", "from ..config import ModelConfig\nfrom . import llama"),
        ("batchrun", "batchrun.cli", "from ..errors import Refused\nimport batchrun.engine.engine\nimport pyarrow"),
        ("prefix_cache", "batchrun.prefix_cache", "import heapq\nimport numpy\nfrom batchrun.prefix_cache.trie import Trie"),
    ],
)
def test_imports_along_the_direction_are_accepted(folder: str, package: str, source: str) -> None:
    assert violations(source, folder, package) == []
