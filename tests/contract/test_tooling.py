"""Rules for the sources that ruff, mypy and import-linter cannot express, and checks of the tooling itself."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import host_reads, need

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
COLLECTORS = sorted((ROOT / "collectors").rglob("*.py"))
# Where a path is words for people: `source` of a metric or event, `help`, and the class attribute `needs`.
WORDS = {"source", "help", "needs"}
ROOTS = re.compile(r"/(sys|proc|dev)(/|$)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")


def foreign_imports(source: str, *, own: tuple[str, ...]) -> list[str]:
    """Imports that are neither of the standard library nor `own` or below it."""
    return [
        f"line {line}: {module}"
        for line, module in imported_modules(ast.parse(source))
        if module.split(".")[0] not in sys.stdlib_module_names
        and not any(module == package or module.startswith(package + ".") for package in own)
    ]


def host_paths(source: str) -> list[str]:
    """Strings that begin with /sys, /proc or /dev, and are not words for people."""
    tree = ast.parse(source)
    words: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):  # only its beginning can make it a path from the root
            words.update(id(part) for part in node.values[1:])
            continue
        if isinstance(node, ast.Assign):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign):
            names = {node.target.id} if isinstance(node.target, ast.Name) else set()
        elif isinstance(node, ast.keyword):
            names = {node.arg or ""}
        else:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            names = WORDS if docstring else set()
        if names & WORDS and (value := getattr(node, "value", None)) is not None:
            words.update(id(inner) for inner in ast.walk(value))
    return [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in words
        and ROOTS.match(node.value)
    ]


def test_plug_in_contract_imports_standard_library_only() -> None:
    assert foreign_imports((ROOT / "agent/api.py").read_text(), own=()) == []


@pytest.mark.parametrize("path", COLLECTORS, ids=name_of)
def test_collector_imports_what_a_foreign_one_may(path: Path) -> None:
    # A collector may be a small package: its own name is its own.
    own = "collectors." + path.relative_to(ROOT / "collectors").parts[0].removesuffix(".py")
    assert foreign_imports(path.read_text(), own=("agent.api", "agent.hw", own)) == []


@pytest.mark.parametrize("path", COLLECTORS, ids=name_of)
def test_collector_reads_below_the_roots_it_is_given(path: Path) -> None:
    assert host_paths(path.read_text()) == [], "use ctx.sys, ctx.proc and ctx.dev: they differ in tests and containers"


def test_host_path_is_found_wherever_it_hides() -> None:
    source = 'path = "/sys/class/net"\ndef read(root=f"/proc/{pid}"):\n    open("/dev/kmsg")\n'
    assert [found.split(":")[0] for found in host_paths(source)] == ["line 1", "line 2", "line 3"]


def test_path_as_words_for_people_is_no_host_path() -> None:
    source = '"""/sys is read."""\nneeds: str = "/dev/kmsg"\nM = Metric(source="/proc/stat")\n'
    assert host_paths(source) == []


def test_path_below_another_root_is_no_host_path() -> None:
    assert host_paths('x = f"{proc}/sys/net", "/system", "class/sys"\n') == []


def test_banned_call_in_a_collector_is_refused_and_elsewhere_is_not(tmp_path: Path) -> None:
    source = '"""A module."""\n\nimport time\n\nprint(time.time())\n'
    banned = lint(source, "collectors/example.py", tmp_path)
    assert "TID251" in banned
    assert "T201" in banned
    assert "TID251" not in lint(source, "agent/example.py", tmp_path)


def lint(source: str, name: str, tmp_path: Path) -> str:
    command = [sys.executable, "-m", "ruff", "check", "--cache-dir", str(tmp_path), "--stdin-filename", name, "-"]
    done = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_missing_program_skips_and_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCWATCH_REQUIRE_PROGRAMS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-program is missing: apt-get install its-package"):
        need("no-such-program", "its-package")


def test_missing_program_fails_where_programs_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCWATCH_REQUIRE_PROGRAMS", "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-program is missing: apt-get install its-package"):
        need("no-such-program", "its-package")


def test_reading_this_machines_hardware_is_noticed_and_a_process_of_ones_own_is_not() -> None:
    with pytest.raises(OSError, match="no-such"):
        Path("/sys/no-such-file").read_text()
    Path("/proc/self/status").read_text()
    Path(f"/proc/{os.getpid()}/status").read_text()
    noticed = host_reads.copy()
    host_reads.clear()
    assert noticed == ["/sys/no-such-file"]


def test_scripts_try_every_python_that_is_declared() -> None:
    declared = re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    script = (ROOT / "scripts/pythons").read_text()
    assert f'SUPPORTED="{" ".join(declared)}"' in script


def test_documented_targets_exist() -> None:
    listed = subprocess.run(
        [need("make", "make"), "help"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    ).stdout
    targets = set(re.findall(r"^make ([a-z-]+) ", listed, re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"\bmake ([a-z-]+)`", (ROOT / document).read_text()))
        assert named <= targets, f"{document} names targets that the Makefile lacks"
