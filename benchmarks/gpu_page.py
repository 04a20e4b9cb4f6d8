"""Write the page of ``gpu_first.py``: verdicts, the first lines of each error, and figures. All functions are pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_cases import CASES, REFERENCE
from gpu_trace import first_difference

__all__ = ["FINE", "page", "verdict"]

FINE = ("ok", "refused", "varies", "other order")
"""Verdicts that are not failures."""

_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Limit on the distance from the unsharded model after training, as a share of the distance that training moved that model,
keyed by the precision of the parameters. Rounding gives about 1e-6 and 1e-2; a missing or stale bucket 0.1 or more."""

_MEANING = {
    "alone": "1 rank, NCCL; bits of repeated runs, and the distance from the unsharded model",
    "blocking": "the same with CUDA_LAUNCH_BLOCKING=1: the bits must be those of `alone`",
    "sanitizer": "the same with TORCH_CUDA_SANITIZER=1, without Thunder's fusion executors",
    "shared": "2 ranks on one GPU, gloo",
    "ranks": "a rank on each GPU, NCCL",
    "ranks, blocking": "the same with CUDA_LAUNCH_BLOCKING=1: the bits must be those of `ranks`",
    "profile": "a step under the profiler; `other order`: the collectives ran in another order than simulated",
}


def verdict(step: Any, case: str, record: Mapping[str, Any] | None, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the verdict on a case in a word or two.

    Args:
        step: a ``gpu_first.Step``.
        record: the record of the case in that step.
        found: the records of all steps, keyed by step and case.
    """
    if record is None:
        return "-"
    if record["status"] != "ok":
        return "refused" if record["status"] == "refused" else "FAILED"
    if any("error" in part and not part.get("refused") for part in record.values() if isinstance(part, dict)):
        return "FAILED"
    if "measured" in record:
        predicted = next((record[k] for k in ("by profile", "by preset") if "order" in record.get(k, {})), None)
        measured = record["measured"]
        return "other order" if predicted and first_difference(predicted["order"], measured["order"]) else "ok"
    if not record["finite"]:
        return "NOT FINITE"
    if record.get("started_alike") is False:
        return "OTHER START"
    precision = CASES[case].precision if case in CASES else "float32"
    if record.get("difference", 0.0) > _TOLERANCE[precision]:
        return "WRONG"
    if len(set(record["digests"])) > 1:
        return "NOT REPEATABLE" if _is_steady(step, found) else "varies"
    other = found.get(step.like, {}).get(case)
    if other and other["status"] == "ok" and record["digests"][0] not in other["digests"]:
        return "OTHER BITS" if _is_steady(step, found) else "varies"
    return "ok"


def _is_steady(step: Any, found: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether the unsharded model has the same bits in all runs. If not, its kernels are not deterministic."""
    of_step = [found.get(name, {}).get(REFERENCE, {}) for name in (step.name, step.like)]
    return len({digest for record in of_step for digest in record.get("digests", ())}) <= 1


def page(
    asked: Mapping[str, Any],
    steps: Sequence[Any],
    found: Mapping[str, Mapping[str, Any]],
    setup: str,
    seconds: float,
) -> tuple[str, int]:
    """Return the page, and the number of failed cases.

    Args:
        asked: the record that describes the machine.
        steps: every ``gpu_first.Step`` that ran.
        found: their records, keyed by step and case.
        setup: the description of the model.
        seconds: the total time.
    """
    cases = [c for c in (REFERENCE, *CASES) if any(c in step.cases for step in steps)]
    verdicts = {
        step.name: {case: verdict(step, case, found[step.name].get(case), found) for case in cases} for step in steps
    }
    tried = [(step, case, word) for step, of_one in verdicts.items() for case, word in of_one.items() if word != "-"]
    failures = [(step, case, word) for step, case, word in tried if word not in FINE]
    lines = [
        "thunder_fsdp_sched, first run on a GPU",
        *_machine(asked),
        f"model: {setup}",
        f"took: {seconds:.0f} s",
        "",
    ]
    refused = sum(word == "refused" for *_, word in tried)
    lines += [f"{len(failures)} of {len(tried)} failed, {refused} were refused with a reason", ""]
    lines += _columns([["", *verdicts], *([case, *(of_one[case] for of_one in verdicts.values())] for case in cases)])
    lines += ["", *(f"{step.name}: {_MEANING[step.name]}" for step in steps)]
    for make in (_training, _profiles):
        table = make(steps, found, cases)
        lines += ["", *table] if table else []
    lines += _errors(failures, verdicts, found)
    loose = sorted({t for step in steps for r in found[step.name].values() for t in r.get("nondeterministic", ())})
    if loose:
        lines += ["", "kernels that torch calls nondeterministic:", *(f"  {text[:160]}" for text in loose)]
    return "\n".join(lines) + "\n", len(failures) + ("machine" not in asked)


def _machine(asked: Mapping[str, Any]) -> list[str]:
    if "machine" not in asked:
        return ["machine: unknown", *_indented(asked.get("error", ""))]
    lines = []
    for key, value in asked["machine"].items():
        if isinstance(value, dict):
            value = " ".join(f"{name}={text}" for name, text in value.items()) or "nothing"
        lines += [f"{key}: {one}" for one in value] if isinstance(value, list) else [f"{key}: {value}"]
    return lines


def _training(steps: Sequence[Any], found: Mapping[str, Mapping[str, Any]], cases: Sequence[str]) -> list[str]:
    """Return the table of times, memory, and distances from the unsharded model."""
    shown = [s for s in steps if s.work == "train" and s.name in ("alone", "shared", "ranks")]
    rows = []
    for case in cases:
        row = [case]
        for step in shown:
            record = found[step.name].get(case, {})
            known = record.get("status") == "ok"
            row.append(f"{record['seconds'] * 1e3:.2f}" if known else "-")
            row.append(f"{record['peak'] / 2**20:.0f}" if known and "peak" in record else "-")
            row.append(f"{record['difference']:.1e}" if known and "difference" in record else "-")
        rows.append(row)
    if not any(cell != "-" for row in rows for cell in row[1:]):
        return []
    head = [f"{s.name}: {what}" for s in shown for what in ("step ms", "peak MiB", "distance")]
    return [
        "distance: from the unsharded model after training, as a share of the distance that training moved it",
        *_columns([["", *head], *rows]),
    ]


def _profiles(steps: Sequence[Any], found: Mapping[str, Mapping[str, Any]], cases: Sequence[str]) -> list[str]:
    """Return the table of measured and predicted times, in ms: measured / with a profile of this GPU / with the preset."""
    lines: list[str] = []
    for step in steps:
        if step.work != "profile":
            continue
        rows, differences = [], []
        for case in cases:
            record = found[step.name].get(case, {})
            if record.get("status") != "ok":
                continue
            parts = [record[k] for k in ("measured", "by profile", "by preset")]
            row = [case, f"{record['seconds'] * 1e3:.2f}"]
            for figure in ("seconds", "compute", "communication", "exposed", "idle"):
                row.append(" / ".join(f"{p[figure] * 1e3:.2f}" if figure in p else "-" for p in parts))
            measured = record["measured"]
            row += [str(measured.get(key, "-")) for key in ("streams", "kernels", "communication_kernels", "copies")]
            rows.append(row)
            for source in ("by profile", "by preset"):
                difference = first_difference(record[source].get("order", ()), measured.get("order", ()))
                if "order" in measured and "order" in record[source] and difference:
                    differences.append(f"  {case}, {source}: {difference}")
        if rows:
            head = ["", "wall", "GPU step", "compute", "communication", "exposed", "idle"]
            head += ["streams", "kernels", "of communication", "copies"]
            lines += [
                "ms of a step: on the GPU / simulated with a profile of this GPU / simulated with the chip's preset",
                *_columns([head, *rows]),
            ]
        if differences:
            lines += ["collectives in another order than predicted, first difference:", *differences]
    return lines


def _errors(
    failures: Sequence[tuple[str, str, str]],
    verdicts: Mapping[str, Mapping[str, str]],
    found: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Return the first lines of each error, once, with the cases that it occurred in."""
    failed: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for step, case, word in failures:
        record = found[step][case]
        texts = [record["error"]] if "error" in record else []
        for key, part in record.items():
            if isinstance(part, dict) and "error" in part and not part.get("refused"):
                texts.append(f"{key}: {part['error']}")
        for text in texts or [_numbers(word, record)]:
            failed.setdefault(text, []).append(f"{step}: {case}")
    for step, of_one in verdicts.items():
        for case in of_one:
            record = found[step].get(case, {})
            if record.get("status") == "refused":
                refused.setdefault(record["error"], []).append(f"{step}: {case}")
            for key, part in record.items():
                if isinstance(part, dict) and part.get("refused"):
                    refused.setdefault(f"{key}: {part['error']}", []).append(f"{step}: {case}")
    lines = []
    for title, texts in (("FAILED", failed), ("refused", refused)):
        for text, where in texts.items():
            lines += ["", f"{title} ({'; '.join(where)})", *_indented(text)]
    return lines


def _numbers(word: str, record: Mapping[str, Any]) -> str:
    """Describe a case that ran and gave wrong numbers."""
    text = (
        f"{word}: losses {', '.join(f'{loss:.6g}' for loss in record['losses'])}; bits {', '.join(record['digests'])}"
    )
    return text + (f"; distance {record['difference']:.2e}" if "difference" in record else "")


def _indented(text: str) -> list[str]:
    wrapped = (textwrap.wrap(line, 116, subsequent_indent="  ")[:5] for line in text.splitlines())
    return [f"  {line}" for lines in wrapped for line in lines]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as text, with the first column aligned to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
