"""Change one place of the core at a time and report the changes that no test notices.

    make mutate                                                       # the listed mutations, and 100 drawn ones
    make mutate MUTATE_ARGS='--listed --only S2'                      # one of the listed ones
    make mutate MUTATE_ARGS='--only "^plan" --seed 7 --number 5000'    # all changes of one room

*Listed* mutations (the table in ``README.md``) each remove a rule that tests once failed to cover, and run tests that ought
to fail. *Drawn* mutations are single changes in the syntax tree of a file of the core. They run the tests of the file's
room. Each runs in a copy of the work tree, the first failed test kills it, and so does a time limit.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import itertools
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest
from mutations_drawn import ROOMS, changes_of, tests_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "thunder_fsdp_sched"
COPIED = (
    *(PACKAGE, "tests", "examples", "benchmarks", "docs"),
    *("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml"),
)

_TEST_SECONDS = 90
"""The time limit of one test. It allows for a machine that is busy; a hang counts as a failure."""


class Mutation(NamedTuple):
    """A change of one file.

    Attributes:
        name: the id of a listed mutation, or the file and line of a drawn one.
        path: the file, from the root.
        text: the whole file, changed.
        change: the old and the new text of the place.
        tests: the tests that may kill it, in their order.
    """

    name: str
    path: str
    text: str
    change: str
    tests: tuple[str, ...]


class Outcome(NamedTuple):
    """The result of the tests that ran with a mutation; ``killed_by`` is empty if all have passed."""

    killed_by: str
    seconds: float
    output: str = ""


def listed() -> Iterator[Mutation]:
    """Yield the listed mutations of the code as it is. They run the file of the test that kills them, and then its folder.

    Raises:
        ValueError: the code has changed, so that a place does not exist or is not unique.
    """
    rows = r"^\| (\w\d) \| .*\(`(.+)`\) \| `(.+)` \| `(.+)` \| `(.+?)::.*` \|$"
    for name, file, *texts, test in re.findall(rows, (ROOT / "tests/README.md").read_text(), re.MULTILINE):
        path, (old, new) = f"{PACKAGE}/{file}", (text.replace("\\n", "\n") for text in texts)
        text = (ROOT / path).read_text()
        if text.count(old) != 1:
            raise ValueError(f"{name}: {path} has {text.count(old)} places with {old!r}; update tests/README.md")
        tests = (f"tests/{test}", *(f"tests/{folder}" for folder, slash, _ in [test.partition("/")] if slash))
        yield Mutation(name, path, text.replace(old, new), f"{old}  ->  {new}", tests)


def drawn(number: int, seed: int) -> list[Mutation]:
    """Draw mutations from all changes of the files of the rooms, each as likely as the others.

    The first ones are the same, however many are drawn.
    """
    known: list[Mutation] = []
    for room in ROOMS:
        for path in sorted((ROOT / PACKAGE / room).glob("*.py")):
            tests = tests_of(room, path, ROOT)
            place = str(path.relative_to(ROOT))
            for change in changes_of(path.read_bytes()):
                known.append(Mutation(f"{room}/{path.name}:{change.line}", place, change.text, change.shown, tests))
    random.Random(seed).shuffle(known)
    return known[:number]


class Copy:
    """A copy of the work tree in a folder of its own, in which tests run with one changed file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "output.txt"
        self.mutation: Mutation | None = None
        for name in COPIED:
            source, ignored = ROOT / name, shutil.ignore_patterns("__pycache__")
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=ignored)
            else:
                shutil.copy2(source, folder)

    def start(self, tests: Sequence[str], mutation: Mutation | None = None) -> int:
        """Start tests in a forked process, and return its number."""
        self.mutation, self.began = mutation, time.monotonic()
        if mutation is not None:
            (self.folder / mutation.path).write_text(mutation.text)
        if not (process := os.fork()):
            os.setsid()
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = 1
            try:
                code = self._test(tests)
            finally:
                os._exit(code)
        return process

    def _test(self, tests: Sequence[str]) -> int:
        os.chdir(self.folder)
        path = [str(self.folder / name) for name in ("", "examples", "tests")]
        sys.path[:] = path + [
            each for each in sys.path if not Path(each).is_relative_to(ROOT) or "site-packages" in each
        ]
        os.environ |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "RANKS_TIMEOUT": "60"}
        os.environ |= {"WORLD_SEED": "0", "WORLD_SHRINK": "0"}
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False
        hypothesis.settings.load_profile("mutate")
        del sys.modules["__main__"].__file__  # which worker processes would run
        options = ("-x", "-q", "--no-header", "--tb=no", f"--timeout={_TEST_SECONDS}", "-p", "no:cacheprovider")
        code = int(pytest.main([*options, *tests]))
        for name, module in sys.modules.items():
            file = getattr(module, "__file__", None)
            if name.partition(".")[0] == PACKAGE and file and not Path(file).is_relative_to(self.folder):
                print(f"{_ELSEWHERE}: {file}")
        sys.stdout.flush()
        return code

    def finish(self, process: int, code: int) -> Outcome:
        """Return the outcome of a process that has ended, and undo the mutation.

        Raises:
            RuntimeError: its tests imported the package from elsewhere.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # its workers
        if self.mutation is not None:  # with its old time, so that Python does not compile it again
            shutil.copy2(ROOT / self.mutation.path, self.folder / self.mutation.path)
        text = self.log.read_text(errors="replace")
        if _ELSEWHERE in text:
            raise RuntimeError(text)
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
        killed_by = failed[1] if failed else f"exit code {code}, or a time limit"
        return Outcome(killed_by if code else "", time.monotonic() - self.began, text)


_ELSEWHERE = "imported the package from elsewhere"


def prepare() -> None:
    """Import what all tests import, apart from the package, so that forked processes need not."""
    spec = importlib.util.spec_from_file_location("compat", ROOT / PACKAGE / "compat.py")
    assert spec is not None and spec.loader is not None
    compat = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compat)
    compat.prepare()
    compat.import_thunder()
    importlib.import_module("torch.distributed.checkpoint")
    phases = [
        phase for phase in hypothesis.Phase if phase.name in ("explicit", "generate")
    ]  # an example need not be small
    hypothesis.settings.register_profile("mutate", phases=phases, derandomize=True, database=None)
    gc.collect()
    gc.freeze()


def main() -> None:
    """Run the command line; the exit code is 1 if tests fail without a mutation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--listed", action="store_true", help="only the listed mutations")
    parser.add_argument("--number", type=int, default=100, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--only", default="", metavar="REGEX", help="only mutations whose name or file matches")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no mutation after so many")
    parser.add_argument("--skip-first", action="store_true", help="do not run all tests without a mutation first")
    args = parser.parse_args()
    mutations = [*listed()] + ([] if args.listed else drawn(args.number, args.seed))
    mutations = [each for each in mutations if re.search(args.only, f"{each.name} {each.path}")]
    if not mutations:
        parser.error(f"--only: no mutation matches {args.only!r}")
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        where = Copy(Path(folder, "copy"))
        if not args.skip_first:
            _must_pass(where, (test for each in mutations for test in each.tests))
        outcomes = dict(_outcomes(where, mutations, time.monotonic() + 60 * args.minutes))
        survived = sum(not outcome.killed_by for outcome in outcomes.values())
        print(f"{len(outcomes)} mutations, {len(outcomes) - survived} killed, {survived} survived")
        _must_pass(where, (each.killed_by for each in outcomes.values() if "::" in each.killed_by))


def _must_pass(where: Copy, tests: Iterable[str]) -> None:
    if not (tests := list(tests)):
        return
    process = where.start(list(dict.fromkeys(tests)))
    found = where.finish(*os.waitpid(process, 0))
    print(f"without a mutation: {found.seconds:.0f} s, {found.output.strip().splitlines()[-1]}", flush=True)
    if found.killed_by:
        sys.exit(f"{found.killed_by} fails without a mutation, too")


def _outcomes(where: Copy, mutations: Sequence[Mutation], until: float) -> Iterator[tuple[Mutation, Outcome]]:
    """Try mutations, and print and yield the outcomes as they come."""
    for mutation in itertools.takewhile(lambda _: time.monotonic() < until, mutations):
        outcome = where.finish(*os.waitpid(where.start(mutation.tests, mutation), 0))
        what = f"killed by {outcome.killed_by}" if outcome.killed_by else f"SURVIVED: {mutation.change}"
        print(f"{mutation.name:<34} {outcome.seconds:4.0f} s  {what}", flush=True)
        yield mutation, outcome


if __name__ == "__main__":
    main()
