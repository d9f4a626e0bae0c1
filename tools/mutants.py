"""`python -m tools.mutants FOLDER…`: breaks the sources at random, one place at a time, and names what no test notices.

Each mutant is one changed expression or one statement that is gone, in a copy of the repository. The tests of the gate
that ran the line are run until one fails. Which they are `coverage` says, in a run of all `--tests` before: test by
test, or with `--by-file` file by file, for tests whose sources run in processes of their own. Where no test ran the
line by itself (it belongs to a module), the tests that ran anything of the file are taken.

Our own, since mutmut and Cosmic Ray run one command for all mutants, change annotations, and delete no statement.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "build" / "mutants"
SOURCES = ("api", "cli", "operator", "trainer_image")
COMPARED = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
CALCULATED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
GATE = {"DISTTRAIN_TESTS": "gate", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
KILLED, SURVIVED, ENDLESS, UNTESTED = "killed", "survived", "did not end", "no test runs it"


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: Path
    line: int
    was: str
    becomes: str
    start: int
    """Offset in the file's bytes."""
    end: int

    def applied(self) -> bytes:
        """The file's bytes with the change; lines keep their numbers."""
        source = (ROOT / self.path).read_bytes()
        lost = self.was.count("\n") - self.becomes.count("\n")
        tail = source[self.end :]
        if lost:
            rest, newline, after = tail.partition(b"\n")
            tail = rest + newline + b"\n" * lost + after
        return source[: self.start] + self.becomes.encode() + tail

    def __str__(self) -> str:
        was, becomes = (" ".join(text.split())[:90] for text in (self.was, self.becomes))
        return f"{self.path}:{self.line}: {was}  ->  {becomes}"


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield every change of a file, whose path is relative to the repository."""
    source = (ROOT / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def change(node: ast.expr | ast.stmt, becomes: ast.AST | str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        text = becomes if isinstance(becomes, str) else f"({ast.unparse(becomes)})"
        return Mutant(path, node.lineno, source[start:end].decode(), text, start, end)

    for node in executed(ast.parse(source)):
        match node:
            case ast.Compare(left, [op], right) if type(op) in COMPARED:
                yield change(node, ast.Compare(left, [COMPARED[type(op)]()], right))
            case ast.BoolOp(op, values):
                yield change(node, ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values))
            case ast.UnaryOp(ast.Not(), operand):
                yield change(node, operand)
            case ast.BinOp(left, op, right) if type(op) in CALCULATED:
                yield change(node, ast.BinOp(left, CALCULATED[type(op)](), right))
            case ast.Constant(bool(value)):
                yield change(node, ast.Constant(not value))
            case ast.Constant(int(value)) | ast.Constant(float(value)):
                yield change(node, ast.Constant(value + 1))
            case ast.IfExp(_, body, orelse):
                yield change(node, body)
                yield change(node, orelse)
            case ast.If(test) | ast.While(test):
                yield change(test, "False")
                if isinstance(node, ast.If):
                    yield change(test, "True")
            case ast.comprehension(ifs=[first, *_]):
                yield change(first, "True")
            case ast.Return(value) if value is not None and not is_none(value):
                yield change(value, "None")
            case ast.Expr(ast.Call() | ast.Await() | ast.Yield() | ast.YieldFrom()) | ast.AugAssign() | ast.Raise():
                yield change(node, "pass")
            case ast.Continue() | ast.Break():
                yield change(node, "pass")


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module that say what it does: no annotation, assertion, decorator or `__main__` block."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Assert | ast.JoinedStr):
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test) in ("__name__ == '__main__'", "TYPE_CHECKING"):
                continue
            yield node
            yield from executed(node)


def chosen(folders: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return so many mutants, at most one of a line."""
    found: dict[tuple[Path, int], list[Mutant]] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for mutant in mutants(path.relative_to(ROOT)):
                found.setdefault((mutant.path, mutant.line), []).append(mutant)
    draw = random.Random(seed)
    places = draw.sample(sorted(found), min(count, len(found)))
    return [draw.choice(found[place]) for place in places]


class Coverage:
    """Which tests ran which lines, as `coverage` has written it."""

    def __init__(self, database: Path) -> None:
        from coverage.numbits import numbits_to_nums

        self._lines: dict[str, dict[str, set[int]]] = {}
        query = """select path, context, numbits from line_bits
            join file on file.id = file_id join context on context.id = context_id"""
        with sqlite3.connect(database) as connection:
            for path, context, bits in connection.execute(query):
                lines = self._lines.setdefault(path, {}).setdefault(context, set())
                lines.update(numbits_to_nums(bits))

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that ran the line, else those that ran any line of the file."""
        ran = next((tests for path, tests in self._lines.items() if path.endswith(f"/{mutant.path}")), {})
        named = {context: lines for context, lines in ran.items() if context.startswith("tests.")}
        of_line = [context for context, lines in named.items() if mutant.line in lines]
        # First those that are called after the module.
        return sorted(
            {test_id(context) for context in of_line or named}, key=lambda id_: (mutant.path.stem not in id_, id_)
        )


def test_id(context: str) -> str:
    """Return pytest's id for `tests.unit.test_it.TestThat.test_here`."""
    parts = context.split(".")
    for length in range(len(parts), 0, -1):
        if (path := Path(*parts[:length]).with_suffix(".py")) and (ROOT / path).is_file():
            return "::".join([str(path), *parts[length:]])
    raise ValueError(f"no file of tests is called {context}")


def measured(tests: Sequence[str], folders: Sequence[str], *, by_file: bool) -> Path:
    """Run the tests, and return coverage's file of who ran what."""
    shutil.rmtree(MEASURED, ignore_errors=True)
    MEASURED.mkdir(parents=True)
    how = (
        "parallel = true\npatch = fork, _exit, subprocess\nsigterm = true"
        if by_file
        else "dynamic_context = test_function"
    )
    sources = "".join(f"\n    {ROOT / folder}" for folder in folders)
    config = MEASURED / "coverage.cfg"
    config.write_text(f"[run]\ndata_file = {MEASURED}/data\nsource ={sources}\n{how}\n")
    coverage = [sys.executable, "-m", "coverage"]
    run = [*coverage, "run", f"--rcfile={config}"]
    if not by_file:
        subprocess.run([*run, "-m", "pytest", "-q", *tests], cwd=ROOT, env=os.environ | GATE, check=False)
        return MEASURED / "data"
    for path in sorted(found for folder in tests for found in (ROOT / folder).rglob("test_*.py")):
        id_ = path.relative_to(ROOT)
        context = f"--context={'.'.join(id_.with_suffix('').parts)}"
        command = [*run, context, "-m", "pytest", "-q", str(id_)]
        subprocess.run(command, cwd=ROOT, env=os.environ | GATE, check=False)
    subprocess.run([*coverage, "combine", "-q", f"--rcfile={config}"], cwd=ROOT, check=True)
    return MEASURED / "data"


def outcome(copy: Path, mutant: Mutant, tests: Sequence[str], seconds: float) -> tuple[str, str]:
    """Return what became of the mutant and the test that saw it."""
    if not tests:
        return UNTESTED, ""
    environment = {
        **os.environ,
        **GATE,
        # Before the editable install's own path.
        "PYTHONPATH": os.pathsep.join(str(copy / name) for name in SOURCES),
    }
    broken = copy / mutant.path
    whole = broken.read_bytes()
    broken.write_bytes(mutant.applied())
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
    try:
        with subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                printed, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                return ENDLESS, f"within {seconds:.0f} s"
    finally:
        broken.write_bytes(whole)
    if process.returncode == 0:
        return SURVIVED, f"{len(tests)} test functions ran"
    seen = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return KILLED, (seen or printed.splitlines()[-1:] or ["?"])[0][:160]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("folders", nargs="+", help="folders of sources, from the repository's root")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--tests", nargs="+", default=["tests/unit"], help="tests that may notice")
    parser.add_argument("--by-file", action="store_true", help="ask which files of tests ran a line, also by processes")
    parser.add_argument("--coverage", type=Path, help="who ran what, of an earlier run: build/mutants/data")
    parser.add_argument("--seconds", type=float, default=600, help="limit of one mutant")
    options = parser.parse_args(arguments)
    coverage = Coverage(options.coverage or measured(options.tests, options.folders, by_file=options.by_file))
    results: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="disttrain-mutants-") as folder:
        copy = Path(folder, "repository")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", ".*_cache"))
        print(f"seed {options.seed}", flush=True)
        for mutant in chosen(options.folders, options.count, options.seed):
            began = time.monotonic()
            result, why = outcome(copy, mutant, coverage.tests(mutant), options.seconds)
            results[result] = results.get(result, 0) + 1
            print(f"{result}: {mutant}  [{why}; {time.monotonic() - began:.0f} s]", flush=True)
    print(", ".join(f"{number} {result}" for result, number in sorted(results.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
