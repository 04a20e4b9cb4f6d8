"""The documentation: its code runs, and its links and includes exist. ``make docs`` builds it."""

from __future__ import annotations

import ast
import copy
import inspect
import re
import subprocess
import sys
from collections import defaultdict
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules, walk_packages
from types import ModuleType
from typing import Any

import thunder_fsdp_sched  # before thunder
from thunder_fsdp_sched.extras.command_line import app

import pytest
import thunder
import torch
from internals import pipeline
from models import Chain, Stack
from passes_table import rows_of, table_of
from ranks import on_ranks
from scenario import Run, loss_of, saved_for_backward
from thunder.core.symbol import Symbol
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

ROOT = Path(__file__).resolve().parents[1]
DOCS, PACKAGE = ROOT / "docs", ROOT / "thunder_fsdp_sched"


def text_of(page: str) -> str:
    return (DOCS / page).read_text()


def blocks_of(text: str) -> list[str]:
    """Return the Python blocks of a text, including those in lists, without their indentation."""
    found = re.findall(r"^( *)```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def section(page: str, title: str) -> str:
    return re.split(r"^## ", text_of(page).partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def run_blocks(*texts: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for text in texts:
        for block in blocks_of(text):
            exec(block, names)
    return names


INTRODUCTION = text_of("extending.md").partition("\n## ")[0]


@pytest.mark.parametrize("title", ["A bucketing rule", "A pass"])
def test_the_code_under_extending_runs(title: str) -> None:
    assert len(blocks_of(section("extending.md", title))) >= 2
    run_blocks(INTRODUCTION, section("extending.md", title))


@on_ranks(2)
def test_the_documented_transport_trains_like_the_unsharded_model() -> None:
    from thunder_fsdp_sched.transports import TRANSPORTS

    before = dict(TRANSPORTS)
    try:
        options = run_blocks(section("extending.md", "A transport"))["transform_options"]
        run = Run(Stack(2).double(), **options)
        run.train(steps=2)
        assert {bucket.comm.transport for bucket in run.transform.plan} == {"broadcasts"}
    finally:
        TRANSPORTS.clear()
        TRANSPORTS.update(before)


@on_ranks(2)
def test_the_flight_recorder_names_collectives() -> None:
    Run(Stack(2).double()).train(steps=1)
    [block] = blocks_of(section("troubleshooting.md", "Ranks"))
    names: dict[str, Any] = {}
    exec(block, names)
    found = {name for _, name in names["collectives"]()}
    for bucket in ("first", "blocks.0", "last"):
        assert {f"fsdp_all_gather({bucket}) in forward", f"fsdp_reduce_scatter({bucket}) in backward"} <= found


def functions_of(module: ModuleType) -> set[str]:
    """Return the names of the functions that a module defines for others."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {n for n, value in public.items() if inspect.isfunction(value) and value.__module__ == module.__name__}


def test_the_table_of_passes_is_that_of_the_code_and_has_all_of_them() -> None:
    assert table_of(pipeline.PHASES, pipeline.OPTIONAL) in text_of("how-it-works.md")
    run = [row.pass_ for phase in pipeline.PHASES for row in rows_of(phase)]
    later = {pass_.__module__ for pass_ in run if ".extras." in pass_.__module__}
    rooms = "mends", "transforms"
    own = {f"{PACKAGE.name}.{room}.{info.name}" for room in rooms for info in iter_modules([str(PACKAGE / room)])}
    modules = [import_module(name) for name in later | own]
    functions = [getattr(module, name) for module in modules for name in functions_of(module)]
    found = {f.__name__ for f in functions if inspect.signature(f).return_annotation == "TraceCtx"}
    assert found == {pass_.__name__ for pass_ in run} - {"verify", "del_last_used"}


def test_everything_that_a_trace_prints_is_explained() -> None:
    """Each symbol that can be in a trace, its named arguments, and the reasons for positions, as the code has them."""
    text = text_of("traces.md")
    symbols: set[Symbol] = set()
    for info in walk_packages(thunder_fsdp_sched.__path__, "thunder_fsdp_sched."):
        path = Path(info.module_finder.path) / f"{info.name.rpartition('.')[2]}.py"  # type: ignore[union-attr]
        if path.exists() and "= register(" in path.read_text():
            symbols |= {s for s in vars(import_module(info.name)).values() if isinstance(s, Symbol)}
    symbols = {s for s in symbols if str(s.name).startswith("fsdp_")}
    assert len(symbols) > 30
    for symbol in symbols:
        parameters = inspect.signature(symbol.meta).parameters.values()
        named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        for printed in (symbol.name, *(f"{name}=" for name in named)):
            assert re.search(rf"`[^`\n]*\b{printed}", text), f"docs/traces.md does not explain {printed}"
    reasons = set()
    for path in (PACKAGE / "transforms/sort_communication.py", PACKAGE / "extras/ranks_differ/follow_order.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                reasons |= set(re.findall(r"^([a-z -]+): ", node.value)) - {"fsdp"}
    assert reasons == set(re.findall(r"^\| `([^`]+)` ", section("traces.md", "Reasons"), re.MULTILINE))


def test_every_example_is_included_in_a_page() -> None:
    included = re.findall(r'^--8<-- "examples/(\w+\.py)', "\n".join(map(text_of, pages())), re.MULTILINE)
    demo = {"byte_gpt.py", "demo.py", "step_counter.py"}  # run by `make demo`
    assert set(included) == {path.name for path in (ROOT / "examples").glob("*.py")} - demo


def test_every_public_name_is_in_the_reference() -> None:
    documented = set(re.findall(r"^::: thunder_fsdp_sched\.(\w+)", "\n".join(map(text_of, pages())), re.MULTILINE))
    assert documented == {name for name in dir(thunder_fsdp_sched) if not name.startswith("_")}


def test_no_two_classes_have_one_name() -> None:
    """One word, one meaning: neither does a private one have the name of another."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in (ROOT / "thunder_fsdp_sched").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


@pytest.mark.parametrize("name", ["fabric", "huggingface", "planning", "reports", "testing"])
def test_public_modules_hold_the_objects_of_their_extra(name: str) -> None:
    """No object exists twice, and ``tfs.testing`` needs no import of its own."""
    module = getattr(thunder_fsdp_sched, name)
    assert module is import_module(f"thunder_fsdp_sched.{name}")
    homes = [sys.modules[path] for path in sys.modules if path.startswith(f"thunder_fsdp_sched.extras.{name}")]
    for public in module.__all__:
        assert any(getattr(home, public, None) is getattr(module, public) for home in homes), public


def test_the_help_of_the_command_line_imports_neither_torch_nor_thunder() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "thunder_fsdp_sched", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "typer" in imported and not {"torch", "thunder"} & imported
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert commands == set(re.findall(r"^  (\w+)  ", result.stdout, re.MULTILINE))


def pages() -> list[str]:
    return sorted(path.name for path in DOCS.glob("*.md"))


def prose(path: str) -> str:
    """Return the text of a file without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", (ROOT / path).read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", *(f"docs/{page}" for page in pages())])
def test_relative_links_exist(path: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose(path)):
        assert "://" in target or (ROOT / path).parent.joinpath(target).exists(), target


def test_the_code_of_the_readme_is_part_of_the_tested_examples() -> None:
    readme = (ROOT / "README.md").read_text()
    blocks = blocks_of(readme)
    loop = next(block for block in blocks if "init_process_group" in block)
    for block, example in ((loop, "train"), (next(b for b in blocks if "save_checkpoint" in b), "resume")):
        lines = iter(line.strip() for line in (ROOT / "examples" / f"{example}.py").read_text().splitlines())
        for line in map(str.strip, block.splitlines()):
            assert line in ("", "...") or line in lines, (
                f"{line!r} is not in examples/{example}.py, or in another order"
            )


def _words() -> torch.nn.Module:
    """Return a language model without attention."""
    block = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    return torch.nn.Sequential(torch.nn.Embedding(8, 4), block, torch.nn.Linear(4, 8)).double()


def _batches_of(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two micro-batches, of which some ranks have more tokens than others."""
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for counted in ((5, 1), (0, 4))[rank]:
        inputs, targets = (torch.randint(8, (2, 3), generator=generator) for _ in range(2))
        targets.flatten()[counted:] = -100
        batches.append((inputs, targets))
    return batches


@on_ranks(2)
def test_the_recipe_for_tokens_gives_the_mean_over_all_tokens(rank: int) -> None:
    torch.manual_seed(0)
    module = _words()
    expected = copy.deepcopy(module)
    names = {"tfs": thunder_fsdp_sched, "thunder": thunder, "torch": torch, "dist": torch.distributed, "module": module}
    [block] = blocks_of(section("training.md", "Normalize by tokens"))
    exec(block, names)
    optimizer = torch.optim.AdamW(expected.parameters())
    for _ in range(2):
        names["train_step"](_batches_of(rank))
        inputs, targets = map(torch.cat, zip(*(_batches_of(0) + _batches_of(1)), strict=True))
        logits = expected(inputs).flatten(0, -2)
        torch.nn.functional.cross_entropy(
            logits, targets.flatten(), ignore_index=-100
        ).backward()  # the mean over tokens
        optimizer.step()
        optimizer.zero_grad()
    for name, value in thunder_fsdp_sched.full_state_dict(names["model"]).items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-9, atol=1e-9)


@on_ranks(2)
def test_the_script_that_comes_from_fsdp2_trains_and_resumes(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(1 + rank)
    batches = [(torch.randn(2, 4), torch.ones(2, 4)) for _ in range(4)]
    [script] = (block for block in blocks_of(text_of("from-fsdp2.md")) if "import thunder  #" in block)
    script = script.replace('dist.init_process_group("gloo")\n', "")
    make = partial(Chain, lambda index: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), count=2)
    names: dict[str, Any] = {"Model": make, "Block": torch.nn.Sequential, "batches": batches, "folder": tmp_path}
    exec(script, names)
    first = thunder_fsdp_sched.full_state_dict(names["model"])
    assert first.keys() == make().state_dict().keys()
    resumed: dict[str, Any] = {**names, "batches": [], "folder": tmp_path}
    exec(script.rpartition("tfs.save_checkpoint")[0], resumed)
    for name, value in thunder_fsdp_sched.full_state_dict(resumed["model"]).items():
        torch.testing.assert_close(value, first[name], rtol=0, atol=0)


@on_ranks(2)
def test_the_loop_that_logs_prints_on_the_first_rank(rank: int) -> None:
    model = thunder.jit(torch.nn.Linear(4, 4), transforms=[thunder_fsdp_sched.fsdp()])
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.ones(64, 4))
    [block] = blocks_of(section("training.md", "Data and metrics"))
    optimizer = torch.optim.AdamW(model.parameters())
    printed: list[str] = []
    names = {"torch": torch, "dist": torch.distributed, "tfs": thunder_fsdp_sched, "print": printed.append}
    exec(block, {**names, "model": model, "optimizer": optimizer, "dataset": data})
    assert [line.partition(":")[0] for line in printed] == [f"epoch {n}, step 0" for n in range(2) if rank == 0]


@on_ranks(2)
def test_wrapped_blocks_are_recomputed_without_more_communication(rank: int) -> None:
    """``test_training`` and ``checkpoint/test_state_dict`` have their values and names."""
    names = {"tfs": thunder_fsdp_sched, "thunder": thunder, "Block": torch.nn.Sequential}
    names["apply_activation_checkpointing"] = apply_activation_checkpointing
    [block] = blocks_of(section("training.md", "Recompute activations"))
    saved_bytes, gathers = [], []
    for code in (block.splitlines()[-1], block):
        names["module"] = _words()
        exec(code, names)
        with saved_for_backward() as saved:
            loss_of(names["model"](_batches_of(rank)[0][0])).backward()
        saved_bytes.append(sum(tensor.nbytes for tensor in saved))
        schedule = names["model"]._lc_transforms[-1].schedules[-1]
        gathers.append([len(part.of("fsdp_all_gather")) for part in (schedule.forward, schedule.backward)])
    assert saved_bytes[1] < saved_bytes[0] and gathers[1] == gathers[0]
