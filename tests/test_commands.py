"""Every command that is printed. ``COMMANDS`` says for each how it runs here with small sizes, or why it does not.

Commands stand in README, docs, CONTRIBUTING, the docstrings of examples and benchmarks, and ``make help``. The arguments of
benchmarks and of the command line are parsed as they are printed, whether the command runs here or not.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.extras.command_line import app

import pytest
import typer
from forked import run_python
from profiles import with_long

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")))
SCRIPTS = (*ROOT.glob("examples/*.py"), *ROOT.glob("benchmarks/*.py"))
PROGRAMS = r"(?:\S*/)?(?:python|torchrun|make|pip|pytest|pre-commit|git)|\.ci/\w+"
COMMAND = rf"(?:sudo )?(?:[A-Z_]+=\S+ )*(?:{PROGRAMS})(?: .*)?"


class Small(NamedTuple):
    """The program runs with these arguments instead."""

    arguments: str
    prints: str  # a regular expression
    long: bool = False  # many compilations, or a second mode of a program that another row starts


class By(NamedTuple):
    """A test runs it."""

    test: str


class Not(NamedTuple):
    """It does not run, for this reason."""

    reason: str


CI = Not("a part of .ci/run or of .ci/versions, or for those who change the package")
INSTALLS = Not("installs or clones from the network")
USERS = Not("needs a program or a folder of the user")
LOOPBACK = "--no-limit --blocks 1 --width 16 --length 8 --rounds 1 --real"  # which needs no root

# The first row whose pattern matches the whole command decides.
COMMANDS: dict[str, Small | By | Not] = {
    # The command line
    r"python -m thunder_fsdp_sched": By("test_docs.py::test_the_help_of_the_command_line"),
    r"python -m thunder_fsdp_sched clusters": Small("clusters", '"name": "h100-sxm"'),
    r"python -m thunder_fsdp_sched trace examples\.plan:make .*": By("test_commands.py::test_the_readme_shows"),
    r"python -m thunder_fsdp_sched (trace|plan) (package\.module:factory|my_models:make)\b.*": USERS,
    r"torchrun .* -m thunder_fsdp_sched bench my_models:make": By(
        "test_bench.py::test_the_documented_command_prints_a_row"
    ),
    r"python -m thunder_fsdp_sched exposed .*": By("test_exposed.py::test_"),
    r"python -m thunder_fsdp_sched diff .*": By("planning/test_dry_run.py::test_plan_prints_the_step"),
    # Examples
    r"torchrun .*\btrain\.py": By("test_examples.py::test_the_training_example_trains"),
    r"torchrun .* examples/resume\.py checkpoints": By("test_examples.py::test_the_restartable_example"),
    r"torchrun .* examples/ranks_differ\.py( --check)?": By("test_examples.py::test_ranks_that_differ_end_together"),
    r"torchrun .* examples/expert_parallel\.py( --check)?": By("test_examples.py::test_experts_in_parallel"),
    r"torchrun .* examples/from_scratch\.py": By("test_examples.py::test_from_scratch_trains"),
    r"torchrun .* examples/evaluate\.py": By("test_examples.py::test_evaluate_gives_the_loss"),
    r"torchrun .* examples/stream_weights\.py": By("test_examples.py::test_the_inference_process"),
    r"torchrun .* examples/chunked_loss\.py": By("test_examples.py::test_a_loss_in_chunks"),
    r"torchrun .* examples/huggingface\.py": By("real_models/test_huggingface.py::test_"),
    r"torchrun .* examples/trainer\.py": By("real_models/test_huggingface.py::test_"),
    r"python examples/demo\.py|make demo": CI,
    r"python examples/fabric\.py checkpoints": By("test_fabric.py::test_"),
    r"python examples/plan\.py": By("test_examples.py::test_plan_compares"),
    r"python examples/plan_llama\.py \d+ \d+": By("test_examples.py::test_plan_llama"),
    r"pytest --update-schedules examples/test_schedule\.py": By("test_testing.py::test_the_example_pins"),
    # Benchmarks
    r"python benchmarks/edges\.py.*": Small("--blocks 1 --communication 1", "zero3, gather_early"),
    r"python benchmarks/checkpoints\.py\b.*": Small(f"{LOOPBACK} --only 'ours, thread'", "ours, thread"),
    r"python benchmarks/gpu\.py first.*": Small(
        "first --stand-in --only alone --cases 'zero3 flat$'", "zero3 flat", long=True
    ),
    r"python benchmarks/gpu_rank\.py link.*": Small("link --cpu --rounds 1", "ours, zero3", long=True),
    r"python benchmarks/gpu_rank\.py memory": Small("memory", "skipped: no GPU"),
    r"python benchmarks/gpu_rank\.py peers.*": Small("peers --cpu --rounds 1", "ours, zero3", long=True),
    r"python benchmarks/overhead\.py --only agreement": Small("--only agreement --rounds 1", "settle"),
    r"python benchmarks/overhead\.py --only dtensors.*": Small(
        "--only dtensors --parameters 4", "microseconds a parameter and step"
    ),
    r"python benchmarks/overhead\.py( --only steps)?": Small(
        "--only steps --blocks 1 --rounds 2", "ours zero3", long=True
    ),
    r"python benchmarks/overlap\.py --count 8": Small(
        "--count 2 --blocks 1 --width 16 --length 8 --only 'ours zero3$'", "ours zero3"
    ),
    r"(sudo )?python benchmarks/overlap\.py.*": Small(f"{LOOPBACK} --only 'ours zero3'", "/max", long=True),
    r"python benchmarks/real_compute\.py.*": Small(
        "--ranks 1 --blocks 1 --width 64 --length 16 --batch 1 --rounds 1 --only 'ours zero2$'", "ours zero2"
    ),
    r"python benchmarks/this_machine\.py": Not("takes minutes: measures what the machine can do"),
    r"python benchmarks/this_machine\.py formats.*": Small("formats --numel 65536 --steps 4", "int8"),
    r"python benchmarks/this_machine\.py kernels.*": Small(
        "kernels --rows 64 --width 16 --rounds 1 --only layer_norm", "layer_norm"
    ),
    r"python benchmarks/tracing\.py.*": Small("--blocks 1 --only plain", "plain"),
    # Others
    r"TEST_DEVICE=cuda .*": Not("needs a GPU"),
    r"pip install .*|git clone .*|make (setup|everything)\b.*|pre-commit install": INSTALLS,
    r"make (test|freeze|mutate|models|lint|format|types|imports|docs|wheel|notebooks)\b.*": CI,
    r"make (clean|distclean)": Not("removes files of this folder"),
    r"\.ci/versions --all --list": Small("--all --list", r"3\.13 .* 2\.13\.0"),
    r"\.ci/(run|versions)\b.*": CI,
    r"\.venv/bin/python -m pytest tests/transforms/test_passes\.py|python tests/world\.py .*": CI,
}


def documented() -> dict[str, str]:
    """Return all commands, each with a place where it is printed."""
    found: dict[str, str] = {}
    for page in PAGES:
        text = (ROOT / page).read_text()
        blocks = re.findall(r"^ *```(?:sh|bash|console|shell)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
        text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
        lines = [line.strip() for line in "\n".join(blocks).splitlines()] + re.findall(
            r"^ {4,}(.*)$", text, re.MULTILINE
        )
        lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
        found |= dict.fromkeys(filter(functools.partial(re.fullmatch, COMMAND), lines), page)
    for script in SCRIPTS:
        lines = (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines()
        found |= dict.fromkeys(re.findall(rf"(?:^ *|: |``)({COMMAND})", "\n".join(lines), re.MULTILINE), script.name)
    makefile = (ROOT / "Makefile").read_text()
    found |= dict.fromkeys(re.findall(r"make \w+", "\n".join(re.findall(r'@echo "(make .*)"', makefile))), "make help")
    without_comments = {
        re.split(r"\s+# |  \(|(?<=\d) \(", command)[0].strip(): place for command, place in found.items()
    }
    return {command.rstrip("`)"): place for command, place in without_comments.items()}


DOCUMENTED = documented()


def row_of(command: str) -> str | None:
    return next((pattern for pattern in COMMANDS if re.fullmatch(pattern, command)), None)


def test_each_command_has_a_row_and_each_row_a_command() -> None:
    rows = {command: row_of(command) for command in DOCUMENTED}
    assert not [f"{DOCUMENTED[command]}: {command}" for command, row in rows.items() if row is None]
    assert set(COMMANDS) == set(rows.values())
    for row in COMMANDS.values():
        if isinstance(row, By):
            file, _, name = row.test.partition("::")
            assert f"def {name}" in (ROOT / "tests" / file).read_text(), f"no test {row.test}"


def test_the_targets_and_the_programs_of_all_commands_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in DOCUMENTED:
        assert targets.issuperset(re.findall(r"^make (\w+)", command)), command
        programs = re.findall(r"\b(?:benchmarks|examples|tests)/\S+\.py\b|\.ci/\w+", command)
        assert all((ROOT / path).exists() for path in programs), command


class _MadeParser(Exception):
    """A program is about to parse its arguments, by ``args[0]``."""


@functools.cache
def _parser_of(program: str) -> argparse.ArgumentParser:
    """Return the parser that a benchmark makes; it runs up to there."""

    def stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        raise _MadeParser(self)

    path = [str(ROOT / "benchmarks"), str(ROOT / "examples"), *sys.path]
    with mock.patch.object(sys, "argv", [program]), mock.patch.object(sys, "path", path):
        with mock.patch.object(argparse.ArgumentParser, "parse_args", stop), pytest.raises(_MadeParser) as made:
            runpy.run_path(str(ROOT / program), run_name="__main__")
    parser: argparse.ArgumentParser = made.value.args[0]
    return parser


def _parse(command: str) -> None:
    """Parse the arguments of a benchmark or of the command line, and run nothing.

    Raises:
        SystemExit: they are wrong; stderr says why.
    """
    words = shlex.split(command)
    if "-m" in words:  # after python, or after torchrun and its own options
        _, _, name, *arguments = words[words.index("-m") :]
        typer.main.get_command(app).commands[name].make_context(name, arguments)  # type: ignore[attr-defined]
    else:
        _, program, *arguments = words[words.index("python") :]
        _parser_of(program).parse_args(arguments)


def test_arguments_are_those_of_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    parsed = [c for c in DOCUMENTED if re.search(r"-m thunder_fsdp_sched \w|python benchmarks/", c)]
    parsed = [c for c in parsed if "-m" in c or "parse_args(" in (ROOT / c.split("python ")[1].split()[0]).read_text()]
    assert len(parsed) > 50
    for command in parsed:
        try:
            _parse(command)
        except (SystemExit, typer.BadParameter) as error:
            pytest.fail(f"{DOCUMENTED[command]}: {command}: {error} {capsys.readouterr().err}")
    with pytest.raises(SystemExit):
        _parse("python benchmarks/overlap.py --no-such-option")


SMALL = {pattern: row for pattern, row in COMMANDS.items() if isinstance(row, Small)}


@pytest.mark.parametrize("pattern", with_long(SMALL, *(pattern for pattern, row in SMALL.items() if row.long)))
def test_programs_run_with_small_sizes(pattern: str, tmp_path: Path) -> None:
    row = SMALL[pattern]
    command = next(c for c in DOCUMENTED if row_of(c) == pattern)
    found = re.search(r"-m thunder_fsdp_sched|benchmarks/\w+\.py|\.ci/versions", command)
    assert found is not None
    program = found[0].split() if found[0].startswith("-m") else [str(ROOT / found[0])]
    arguments = (*program, *shlex.split(row.arguments))
    result = run_python("-W", "ignore", *arguments, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(row.prints, result.stdout), result.stdout + result.stderr


def test_the_readme_shows_what_the_command_prints(tmp_path: Path) -> None:
    [command] = (c for c in DOCUMENTED if " trace examples.plan:make " in c)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    result = run_python("-W", "ignore", *shlex.split(command)[1:], cwd=tmp_path, env={"COLUMNS": "400"})
    printed = re.sub(r"\bf?t\d+", "t", result.stdout)
    shown = re.findall(
        r"^ {4,6}(\d+) (.*(?:fsdp_all_gather|fsdp_wait_params)\(.*)", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert len(shown) == 12
    for _, line in shown:
        pattern = ".*".join(map(re.escape, re.sub(r"\bf?t\d+", "t", line).split("…")))
        assert re.search(pattern, printed), f"{line}\n{printed}"
