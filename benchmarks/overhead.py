"""Measure the host time of the plugin: at run time per bucket, in the prologue per call, and when compiling.

    python benchmarks/overhead.py --save overhead                 # everything; about five minutes
    python benchmarks/overhead.py --only steps prologue           # a minute
    python benchmarks/overhead.py --only compile --blocks-of linear --blocks 8 32 128 --no-gc
    python benchmarks/overhead.py --only compile --blocks 128     # a GPT; Thunder traces it for many minutes

Each part runs in a separate process, as rank 0 of 8 with torch's fake process group. The collectives of that group do
nothing, so only the host time of their callers remains. (With real gloo ranks, most of the time would be spent waiting for
another process.)

* Steps: a model of tiny blocks is trained by Thunder, by this project, without a compiler, and by FSDP2. They take turns,
  with a few steps of each in every round. Each system is compared with the same compiler without sharding. The time of the
  collectives' own calls is subtracted; it is measured separately, in the same rounds with the same tensors. A second table
  shows the time inside the calls that gather and reduce, from separate steps.
* Prologue: the checks of Thunder in every call, with shards and without, for the same number of parameters.
* Agreement: two real gloo ranks exchange tokens, as each trace that communicates does. The host time of a round is the time
  to post it, and to settle it after the other rank's token has arrived. A step has two rounds.
* Compiling: processor seconds to compile a model on the meta device, in a separate process for each number of blocks.
  Python collects garbage during whichever pass is running, and a full collection takes longer the more traces Thunder keeps.
  ``--no-gc`` measures the passes without garbage collection.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PARTS = ("steps", "prologue", "agreement", "compile")
MOST_A_COLLECTIVE = 60.0  # microseconds beyond the collective's own call
MOST_OF_FSDP2 = 0.5  # share of FSDP2's time beyond the own call
MOST_A_ROUND = 100.0  # microseconds of host time for a round of agreement
MOST_OF_COMPILING = 0.10  # share of Thunder's own compile time, at 32 blocks of a GPT


def main() -> None:
    arguments = parse()
    if arguments.child:
        import overhead_parts

        print(json.dumps(getattr(overhead_parts, arguments.child)(arguments)))
        return
    results: dict[str, Any] = {}
    if "steps" in arguments.only:
        results["steps"] = run("steps")
    if "prologue" in arguments.only:
        results["prologue"] = [run("prologue", "--parameters", str(n)) for n in arguments.parameters]
    if "agreement" in arguments.only:
        results["agreement"] = run("agreement")
    if "compile" in arguments.only:
        results["compile"] = [run("compiling", "--blocks", str(n)) for n in arguments.blocks]
    show(arguments, results)
    if arguments.save:
        arguments.save.mkdir(parents=True, exist_ok=True)
        (arguments.save / "overhead.json").write_text(json.dumps(results, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of steps and of prologues")
    parser.add_argument("--tiny-blocks", type=int, default=6, help="blocks of the model whose steps are timed")
    parser.add_argument("--layers", type=int, default=6, help="linear layers of such a block, two parameters each")
    parser.add_argument("--parameters", type=int, nargs="+", default=[300, 3000], help="parameters of the prologues")
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 32], help="blocks of the models to compile")
    parser.add_argument("--blocks-of", choices=("gpt", "linear"), default="gpt", help="what to compile")
    parser.add_argument("--no-gc", action="store_true", help="compile without garbage collection")
    parser.add_argument("--save", type=Path, help="folder for overhead.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def run(part: str, *options: str) -> Any:
    """Measure one part in a new process."""
    print(f"measuring: {' '.join((part, *options))}", file=sys.stderr, flush=True)
    command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], *options, "--child", part]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def show(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    from thunder_fsdp_sched.demo.show import make_console

    console = make_console()
    bars: list[tuple[str, float, str, bool]] = []
    if "steps" in results:
        for table in steps_tables(results["steps"], bars):
            console.print(table, highlight=False)
    if "prologue" in results:
        console.print(prologue_table(results["prologue"]), highlight=False)
    if "agreement" in results:
        console.print(agreement_table(results["agreement"], bars), highlight=False)
    if "compile" in results:
        console.print(compile_table(arguments, results["compile"], bars), highlight=False)
    results["bars"] = [dict(zip(("what", "figure", "limit", "passed"), bar, strict=True)) for bar in bars]
    table = _table("Limits", "what", "figure", "limit", "")
    for what, figure, limit, passed in bars:
        table.add_row(what, f"{figure:.3g}", limit, "[green]pass[/]" if passed else "[red]FAIL[/]")
    console.print(table, highlight=False)


def steps_tables(steps: dict[str, Any], bars: list[tuple[str, float, str, bool]]) -> list[Any]:
    whole = _table(
        f"Microseconds of a step: {steps['blocks']} blocks of {steps['parameters']} parameters, fake group of 8",
        *("", "step", "unsharded", "difference", "gathers", "reductions", "own calls", "beyond them", "each"),
    )
    inside = _table(
        "Microseconds for one collective, within the calls that issue it and wait for it",
        *("", "gather: issue", "wait", "own call", "beyond it", "reduce: issue", "wait", "own call", "beyond it"),
    )
    for name, of_one in steps["systems"].items():
        if "each" not in of_one:
            continue
        keys = ("step", "unsharded", "difference", "gathers", "reductions", "own_calls", "beyond", "each")
        whole.add_row(name, *(f"{of_one[key]:.0f}" for key in keys))
        row = []
        for kind in ("gather", "reduce"):
            one = of_one[kind]
            row += [one["issue"], one["wait"], one["own_call"], one["beyond"]]
        inside.add_row(name, *(f"{value:.1f}" for value in row))
    for strategy in ("zero2", "zero3"):
        ours, theirs = steps["systems"][f"ours {strategy}"], steps["systems"][f"FSDP2 {strategy}"]
        for what, mine, other in (
            ("a gather", ours["gather"]["beyond"], theirs["gather"]["beyond"]),
            ("a reduction", ours["reduce"]["beyond"], theirs["reduce"]["beyond"]),
            ("the whole step, per collective", ours["each"], theirs["each"]),
        ):
            limit = f"{MOST_A_COLLECTIVE:g} us"
            bars.append((f"{strategy}: {what}, beyond its own call", mine, limit, mine <= MOST_A_COLLECTIVE))
            bars.append(
                (f"{strategy}: {what}, over FSDP2's", mine / other, f"{MOST_OF_FSDP2:g}", mine <= MOST_OF_FSDP2 * other)
            )
    whole.caption = "Each: time beyond the own calls, divided by the number of collectives."
    inside.caption = "FSDP2's copies and reshards are included. Own call: the collective alone, called in a loop."
    return [whole, inside]


def prologue_table(prologues: list[dict[str, Any]]) -> Any:
    table = _table("Milliseconds of a prologue", "parameters", "Thunder", "ours", "ratio")
    for one in prologues:
        ratio = f"{one['ours'] / one['thunder']:.2f}"
        table.add_row(f"{one['parameters']:,}", f"{one['thunder']:.3f}", f"{one['ours']:.3f}", ratio)
    return table


def agreement_table(found: dict[str, Any], bars: list[tuple[str, float, str, bool]]) -> Any:
    table = _table("Microseconds of a round of agreement, 2 gloo ranks", "", "median", "10th percentile")
    for key, text in (
        ("post", "post"),
        ("post, processor", "post, processor time of the host's thread"),
        ("settle", "settle, after the token has arrived"),
        ("settle, processor", "settle, processor time of the host's thread"),
        ("blocking", "post and settle at once, the other rank's answer included"),
    ):
        table.add_row(text, *(f"{found[key][of]:.1f}" for of in ("median", "tenth")))
    host = found["post, processor"]["median"] + found["settle, processor"]["median"]
    bars.append(("agreement: host time of a round", host, f"{MOST_A_ROUND:g} us", host <= MOST_A_ROUND))
    return table


def compile_table(
    arguments: argparse.Namespace, compiled: list[dict[str, Any]], bars: list[tuple[str, float, str, bool]]
) -> Any:
    collecting = "without garbage collection" if arguments.no_gc else "garbage collection included"
    table = _table(
        f"Processor seconds of compiling blocks of {arguments.blocks_of}, {collecting}",
        *("", *(f"{one['blocks']} blocks" for one in compiled)),
    )
    for key, text in (("symbols", "bound symbols"), ("gigabytes", "peak memory, GB"), ("thunder", "Thunder's own, s")):
        table.add_row(text, *(f"{one[key]:,.1f}".removesuffix(".0") for one in compiled))
    table.add_row("of that, in our pass that differentiates, s", *(f"{one['differentiating']:.2f}" for one in compiled))
    table.add_row("our other passes, s", *(f"{one['ours']:.2f}" for one in compiled))
    table.add_row(
        "our other passes / Thunder's own",
        *(f"{one['ours'] / one['thunder']:.1%}" for one in compiled),
        end_section=True,
    )
    last = compiled[-1]["passes"]
    for name in sorted(last, key=last.get, reverse=True):
        table.add_row(name, *(f"{one['passes'].get(name, 0.0):.3f}" for one in compiled))
    for one in compiled:
        if one["blocks"] == 32 and arguments.blocks_of == "gpt":
            share = one["ours"] / one["thunder"]
            limit = f"{MOST_OF_COMPILING:g}"
            bars.append(
                (
                    "our other passes over Thunder's own, 32 GPT blocks",
                    share,
                    limit,
                    share <= MOST_OF_COMPILING,
                )
            )
    return table


def _table(title: str, *columns: str) -> Any:
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD, caption_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", no_wrap=index == 0)
    return made


if __name__ == "__main__":
    main()
