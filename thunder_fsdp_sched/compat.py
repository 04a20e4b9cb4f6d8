"""Additions that Lightning Thunder needs to import with newer releases of torch.

``thunder_fsdp_sched/__init__.py`` calls :func:`prepare`, through :func:`start`, before anything imports ``thunder``. It does
two things.

1. It reads the installed versions of torch and lightning-thunder from their metadata and raises an ``ImportError``
   that names what was found and what works, before an import fails somewhere inside Thunder.
2. It adds attributes that Thunder reads during its import and that newer releases of torch no longer have:

   ====================  ==========================================================================================
   torch                 missing
   ====================  ==========================================================================================
   2.10, 2.11, 2.12      nothing
   2.13                  ``torch.Tensor.align_as``, ``align_to``, ``has_names``, ``refine_names``, ``rename``
   2.14, 2.15            these, and ``torch.autograd.Function.apply.__func__`` (``apply`` became a C classmethod)
   ====================  ==========================================================================================

   Named tensors are gone from torch, so the five methods raise when they are called. ``Function.apply`` is used by
   every custom autograd function, so its replacement works: it forwards each call to torch's own ``apply``.

Only missing attributes are added, whatever the version, and a second call adds nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.1.0"
"""The version of this package. ``pyproject.toml`` reads it here, so it is known without an installation, too."""


#: The supported releases: from the first on, below the second. pyproject.toml has the same ranges (a test compares them).
SUPPORTED = {"torch": ("2.10", "2.16"), "lightning-thunder": ("0.2.6", "0.3")}

#: The methods of ``torch.Tensor`` that Thunder's table of torch operators names and that torch 2.13 removed.
NAMED_TENSOR_METHODS = ("align_as", "align_to", "has_names", "refine_names", "rename")


def start() -> None:
    """Prepare torch for Thunder, and import Thunder."""
    prepare()
    import_thunder()


def prepare() -> tuple[str, ...]:
    """Check the versions and add what the installed torch lacks for ``import thunder``.

    Returns the names of the added attributes, so nothing on a second call. Raises ``ImportError`` if torch or
    lightning-thunder is missing, too old or too new, or if an earlier ``import thunder`` failed in this process,
    because Thunder cannot be imported again after that.
    """
    check_versions()
    _refuse_half_imported_thunder()
    return (*_add_named_tensor_methods(), *_add_function_apply_func())


def import_thunder() -> None:
    """Import Thunder without its warning that one of its optional executors is not installed.

    The warning occurs only during the import. If Thunder is imported before this package, it still appears.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="transformer_engine module not found")
        importlib.import_module("thunder")


def check_versions() -> None:
    """Raise ``ImportError`` unless the installed torch and lightning-thunder are supported.

    Thunder is not imported. Release numbers are compared, so a pre-release or a local build (``2.10.0a0+abc``) counts
    as the release that it precedes.
    """
    problems = [problem for name in SUPPORTED if (problem := _version_problem(name))]
    if problems:
        wanted = " ".join(f'"{requirement}"' for requirement in requirements())
        raise ImportError(f"thunder_fsdp_sched cannot work here: {'; '.join(problems)}. Working versions: {wanted}.")


def requirements() -> list[str]:
    """Return the supported releases as pip reads them."""
    return [f"{name}>={lowest},<{limit}" for name, (lowest, limit) in SUPPORTED.items()]


def _version_problem(name: str) -> str | None:
    lowest, limit = SUPPORTED[name]
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is not installed"
    release = _release(found or "")  # a broken installation has None for its version
    if not release:
        return f"the installed {name} has no version that can be read ({found!r})"
    if release < _release(lowest):
        return f"{name} {found} is too old (needs {lowest} or later)"
    if release >= _release(limit):
        return f"{name} {found} is too new (needs a release before {limit})"
    return None


def _release(version: str) -> tuple[int, ...]:
    """Return the release number of a version without trailing zeros: ``(2, 13)`` for ``2.13.0+cpu``; ``()`` if invalid."""
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)", version)
    if match is None:
        return ()
    return tuple(int(number) for number in re.sub(r"(\.0+)*$", "", match[1]).split("."))


def _refuse_half_imported_thunder() -> None:
    if "thunder" not in sys.modules and any(name.startswith("thunder.") for name in sys.modules):
        raise ImportError(
            "an earlier `import thunder` failed in this process, and what it left behind cannot be imported again. "
            "Start a new process (restart the kernel of a notebook) and import thunder_fsdp_sched before thunder: "
            "it adds what thunder misses in newer releases of torch."
        )


def _add_named_tensor_methods() -> list[str]:
    import torch

    missing = [name for name in NAMED_TENSOR_METHODS if not hasattr(torch.Tensor, name)]
    for name in missing:
        setattr(torch.Tensor, name, _removed_method(name, torch.__version__))
    return [f"torch.Tensor.{name}" for name in missing]


def _removed_method(name: str, torch_version: str) -> Callable[..., NoReturn]:
    def stand_in(*args: Any, **kwargs: Any) -> NoReturn:
        # AttributeError, as from this torch without the stand-in.
        raise AttributeError(
            f"torch.Tensor.{name} does not exist in torch {torch_version}: named tensors were removed in torch 2.13. "
            "thunder_fsdp_sched added this stand-in only so that `import thunder` finds the name."
        )

    # Thunder registers the method under its __name__.
    stand_in.__name__ = name
    stand_in.__qualname__ = f"Tensor.{name}"
    return stand_in


def _add_function_apply_func() -> list[str]:
    from torch.autograd.function import Function

    if hasattr(Function.apply, "__func__"):
        return []
    own_apply = inspect.getattr_static(Function, "apply")

    # Thunder registers the __func__ of Function.apply and recognizes a custom autograd function by it while it traces
    # a model, so the replacement must stay. Calls that are not traced are forwarded to torch's own apply.
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return own_apply.__get__(None, cls)(*args, **kwargs)

    apply.__qualname__ = "Function.apply"
    apply.__doc__ = getattr(own_apply, "__doc__", None)
    Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    return ["torch.autograd.Function.apply.__func__"]
