"""What the attention patch stands on here: versions, signature, and which models it reaches."""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from types import CodeType, FunctionType, ModuleType

import mlx_lm

from . import seam
from ._patch import PatchConflict, UnsupportedVersion
from .attention import MLX_LM_BELOW, MLX_LM_LOW, PATCH

MODELS = "mlx_lm.models."
_NAME_LOADS = ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD")


@dataclass(frozen=True, slots=True)
class SeamReport:
    """Versions found and required, and the loaded model modules by how they do attention.

    ``reached`` modules bind the patched function. ``bypassing`` ones, with the reason, compute
    attention outside it somewhere (they may do both). ``problem`` says why the patch cannot be
    installed, if it cannot.
    """

    mlx: str
    mlx_lm: str
    required: str
    signature: str
    installed: bool
    problem: str | None
    reached: tuple[str, ...]
    bypassing: dict[str, str]

    def __str__(self) -> str:
        lines = [
            f"mlx {self.mlx}, mlx-lm {self.mlx_lm} (required: {self.required})",
            f"{seam.BASE}.{seam.NAME}{self.signature}",
            "installed" if self.installed else f"not installed ({self.problem or 'it can be'})",
            f"reached: {', '.join(self.reached) or 'no model module is loaded'}",
        ]
        lines += [f"bypassing: {module}: {reason}" for module, reason in self.bypassing.items()]
        return "\n".join(lines)


def seam_report() -> SeamReport:
    """Look at this process as it is; imports no model and changes nothing."""
    problem = None
    try:
        PATCH.check()
    except (UnsupportedVersion, PatchConflict) as error:
        problem = str(error)
    current = seam.current_seam()
    reached, bypassing = [], {}
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(MODELS) or not isinstance(module, ModuleType) or name == seam.BASE:
            continue
        if any(_reaches(value) for value in list(vars(module).values())):
            reached.append(name)
        reason = _find_bypass(module)
        if reason is not None:
            bypassing[name] = reason
    return SeamReport(
        mlx=metadata.version("mlx"),
        mlx_lm=mlx_lm.__version__,
        required=f"mlx-lm >= {MLX_LM_LOW}, < {MLX_LM_BELOW}",
        signature=str(inspect.signature(current)) if current else "",
        installed=PATCH.is_installed(),
        problem=problem,
        reached=tuple(reached),
        bypassing=bypassing,
    )


def _reaches(value: object) -> bool:
    named = getattr(value, "__name__", None) == seam.NAME
    return seam.is_seam(value) or (named and any(seam.is_seam(f) for f in seam.chain(value)))


def _find_bypass(module: ModuleType) -> str | None:
    """Read the names a module's code uses; for people, so a guess here decides nothing."""
    for owner, code in _code_objects(module):
        names = [i.argval for i in dis.get_instructions(code) if i.opname in _NAME_LOADS]
        if ("fast", seam.NAME) in itertools.pairwise(names):
            return f"{code.co_qualname} calls mx.fast.{seam.NAME} directly"
        if "softmax" in code.co_names and "attention" in f"{owner}.{code.co_name}".lower():
            return f"{code.co_qualname} computes its own softmax"
    return None


def _code_objects(module: ModuleType) -> Iterator[tuple[str, CodeType]]:
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType):
            yield name, value.__code__
        elif isinstance(value, type):
            for member in vars(value).values():
                if isinstance(member, FunctionType):
                    yield name, member.__code__
