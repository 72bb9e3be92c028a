"""Orders of importing, patching and unpatching, each a function run in a process of its own.

Run as a script: prints one JSON object, name to null or a traceback. A process is forked for each
ordering *before* anything of MLX is imported; only the slow libraries underneath are shared, so
every ordering imports mlx, mlx_lm and pion_patches afresh in a fraction of a second.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

PATCHES = Path(__file__).parents[2] / "patches"
ORDERINGS: dict[str, Callable[[], None]] = {}


def ordering(function: Callable[[], None]) -> Callable[[], None]:
    ORDERINGS[function.__name__] = function
    return function


def import_patch() -> Any:
    return importlib.import_module("pion_patches.attention")


def import_base() -> Any:
    return importlib.import_module("mlx_lm.models.base")


def import_model(name: str = "llama") -> Any:
    return importlib.import_module(f"mlx_lm.models.{name}")


def problem() -> tuple[Any, ...]:
    import mlx.core as mx

    mx.random.seed(11)
    queries = mx.random.normal((1, 4, 3, 8))
    keys, values = mx.random.normal((2, 1, 2, 9, 8))
    return queries, keys, values


def stock_answer() -> Any:
    import mlx.core as mx

    queries, keys, values = problem()
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask="causal")


def assert_stock(module: Any) -> None:
    """Plain arrays give mlx-lm's own answer, bit for bit, installed or not."""
    queries, keys, values = problem()
    out = module.scaled_dot_product_attention(queries, keys, values, None, 0.3, "causal")
    assert out.tolist() == stock_answer().tolist(), module


def attend_split(module: Any, split: ModuleType | None = None) -> Any:
    split = split or importlib.import_module("pion_patches.split")
    queries, keys, values = problem()
    handles = [split.SplitRows((a[:, :, :5], a[:, :, 5:])) for a in (keys, values)]
    return module.scaled_dot_product_attention(queries, *handles, None, scale=0.3, mask="causal")


def assert_patched(module: Any, split: ModuleType | None = None) -> None:
    import mlx.core as mx

    assert_stock(module)
    assert mx.allclose(attend_split(module, split), stock_answer(), atol=1e-6), module


def assert_unpatched(module: Any) -> None:
    assert_stock(module)
    assert_raises(TypeError, lambda: attend_split(module))


def assert_raises(kind: type[BaseException], call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


@ordering
def patch_then_import_the_model() -> None:
    patch = import_patch()
    patch.install_pion_attention_patch()
    llama = import_model()
    assert_patched(llama)
    patch.uninstall_pion_attention_patch()
    assert_unpatched(llama)
    assert_unpatched(import_model("qwen3"))


@ordering
def import_the_model_then_patch() -> None:
    llama = import_model()
    patch = import_patch()
    assert not patch.is_installed()
    assert_unpatched(llama)
    patch.install_pion_attention_patch()
    assert patch.is_installed()
    assert_patched(llama)
    assert_patched(import_model("qwen3"))
    patch.uninstall_pion_attention_patch()
    assert not patch.is_installed()
    for module in (llama, import_model("qwen3"), import_model("gemma3_text")):
        assert_unpatched(module)


@ordering
def patch_twice_and_unpatch_once() -> None:
    patch, llama = import_patch(), import_model()
    function = llama.scaled_dot_product_attention
    stock = function.__code__, function.__defaults__, function.__kwdefaults__, dict(vars(function))
    patch.install_pion_attention_patch()
    once = function.__code__, function.__wrapped__
    patch.install_pion_attention_patch()
    assert (function.__code__, function.__wrapped__) == once
    patch.uninstall_pion_attention_patch()
    assert_unpatched(llama)
    # Everything about the function is what it was.
    after = function.__code__, function.__defaults__, function.__kwdefaults__, dict(vars(function))
    assert after == stock


@ordering
def unpatch_twice() -> None:
    patch, llama = import_patch(), import_model()
    patch.uninstall_pion_attention_patch()
    patch.install_pion_attention_patch()
    patch.uninstall_pion_attention_patch()
    patch.uninstall_pion_attention_patch()
    assert_unpatched(llama)
    patch.install_pion_attention_patch()
    assert_patched(llama)


@ordering
def a_with_block_leaves_things_as_they_were() -> None:
    patch, llama = import_patch(), import_model()
    with patch.pion_attention_patch():
        assert_patched(llama)
        with patch.pion_attention_patch():
            assert_patched(llama)
        assert_patched(llama)
    assert_unpatched(llama)
    patch.install_pion_attention_patch()
    with patch.pion_attention_patch():
        pass
    assert_patched(llama)


def wrap(function: Any) -> Any:
    """Another patcher in the polite style."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def wrap_rudely(function: Any) -> Any:
    """Another patcher that leaves no trace but its closure."""

    def wrapper(queries: Any, keys: Any, values: Any, *rest: Any, **named: Any) -> Any:
        return function(queries, keys, values, *rest, **named)

    return wrapper


@ordering
def another_patcher_before_us_keeps_its_place() -> None:
    for style in (wrap, wrap_rudely):
        base = import_base()
        early = import_model()  # bound before the other patcher
        original = base.scaled_dot_product_attention
        base.scaled_dot_product_attention = other = style(original)
        sys.modules.pop("mlx_lm.models.qwen3", None)  # from the style before
        late = import_model("qwen3")  # bound to the other patcher's wrapper
        assert late.scaled_dot_product_attention is other
        patch = import_patch()
        patch.install_pion_attention_patch()
        for module in (early, late, base):
            assert_patched(module)
        assert base.scaled_dot_product_attention is other
        patch.uninstall_pion_attention_patch()
        assert base.scaled_dot_product_attention is other
        for module in (early, late, base):
            assert_unpatched(module)
        base.scaled_dot_product_attention = original


class HiddenOriginal:
    """Another patcher whose original cannot be found from outside."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, queries: Any, keys: Any, values: Any, *rest: Any, **named: Any) -> Any:
        return self.function(queries, keys, values, *rest, **named)


@ordering
def another_patcher_after_us_must_go_first() -> None:
    for style in (wrap, wrap_rudely, HiddenOriginal):
        patch, base, llama = import_patch(), import_base(), import_model()
        patch.install_pion_attention_patch()
        ours = base.scaled_dot_product_attention
        base.scaled_dot_product_attention = style(ours)
        assert_patched(base)
        words = assert_raises(
            importlib.import_module("pion_patches._patch").PatchConflict,
            patch.uninstall_pion_attention_patch,
        )
        assert "mlx_lm.models.base.scaled_dot_product_attention was wrapped over" in words
        assert patch.is_installed()
        for module in (base, llama):
            assert_patched(module)
        base.scaled_dot_product_attention = ours
        patch.uninstall_pion_attention_patch()
        for module in (base, llama):
            assert_unpatched(module)


@ordering
def a_wrapper_around_one_model_only_is_noticed() -> None:
    patch, llama = import_patch(), import_model()
    patch.install_pion_attention_patch()
    ours = llama.scaled_dot_product_attention
    llama.scaled_dot_product_attention = functools.partial(ours)
    words = assert_raises(
        importlib.import_module("pion_patches._patch").PatchConflict,
        patch.uninstall_pion_attention_patch,
    )
    assert "mlx_lm.models.llama" in words
    llama.scaled_dot_product_attention = ours
    patch.uninstall_pion_attention_patch()
    assert_unpatched(llama)


@ordering
def a_body_exchanged_again_by_somebody_else_is_noticed() -> None:
    patch, base = import_patch(), import_base()
    patch.install_pion_attention_patch()
    function = base.scaled_dot_product_attention
    ours = function.__code__
    function.__code__ = ours.replace(co_name="theirs")
    words = assert_raises(
        importlib.import_module("pion_patches._patch").PatchConflict,
        patch.uninstall_pion_attention_patch,
    )
    assert "exchanged again" in words
    function.__code__ = ours
    patch.uninstall_pion_attention_patch()
    assert_unpatched(base)


@ordering
def our_modules_reloaded_while_installed_still_know_and_undo_it() -> None:
    llama, patch = import_model(), import_patch()
    patch.install_pion_attention_patch()
    for name in ("_patch", "seam", "masks", "lse", "split", "attention"):
        importlib.reload(importlib.import_module(f"pion_patches.{name}"))
    patch = import_patch()
    assert patch.is_installed()
    assert_patched(llama)
    patch.install_pion_attention_patch()
    patch.uninstall_pion_attention_patch()
    assert not patch.is_installed()
    assert_unpatched(llama)


@ordering
def mlx_lm_reloaded_while_installed_is_reached_by_installing_again() -> None:
    base, patch, early = import_base(), import_patch(), import_model()
    patch.install_pion_attention_patch()
    importlib.reload(base)
    late = import_model("qwen3")
    assert early.scaled_dot_product_attention is not late.scaled_dot_product_attention
    assert not patch.is_installed()
    assert_patched(early)
    assert_unpatched(late)
    patch.install_pion_attention_patch()
    for module in (early, late):
        assert_patched(module)
    patch.uninstall_pion_attention_patch()
    for module in (early, late):
        assert_unpatched(module)


@ordering
def two_copies_of_our_package_agree() -> None:
    llama, first = import_model(), import_patch()
    first_split = importlib.import_module("pion_patches.split")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(PATCHES / "pion_patches", Path(folder) / "pion_patches")
        for name in [n for n in sys.modules if n.split(".")[0] == "pion_patches"]:
            del sys.modules[name]
        sys.path.insert(0, folder)
        second = import_patch()
        second_split = importlib.import_module("pion_patches.split")
        assert second.__file__.startswith(folder)
    assert second is not first
    first.install_pion_attention_patch()
    assert second.is_installed()
    second.install_pion_attention_patch()
    for copy in (first_split, second_split):
        assert_patched(llama, copy)
    second.uninstall_pion_attention_patch()
    assert not first.is_installed()
    assert_unpatched(llama)
    first.uninstall_pion_attention_patch()
    assert_unpatched(llama)


@ordering
def a_copy_that_speaks_another_protocol_is_left_alone() -> None:
    patch, base = import_patch(), import_base()
    patch.install_pion_attention_patch()
    function = base.scaled_dot_product_attention
    function.__pion_seam__["protocol"] = 99
    words = assert_raises(
        importlib.import_module("pion_patches._patch").PatchConflict,
        patch.uninstall_pion_attention_patch,
    )
    assert "protocol 99" in words
    assert_patched(base)


@ordering
def a_model_file_outside_sys_modules_is_reached_too() -> None:
    patch = import_patch()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "custom.py"
        path.write_text("from mlx_lm.models.base import scaled_dot_product_attention\n")
        spec = importlib.util.spec_from_file_location("custom_model", path)
        assert spec is not None
        assert spec.loader is not None
        custom = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(custom)
    assert "custom_model" not in sys.modules
    patch.install_pion_attention_patch()
    assert_patched(custom)
    patch.uninstall_pion_attention_patch()
    assert_unpatched(custom)


@ordering
def an_untested_version_or_signature_changes_nothing() -> None:
    import mlx_lm

    patch, base = import_patch(), import_base()
    unsupported = importlib.import_module("pion_patches._patch").UnsupportedVersion
    function, found = base.scaled_dot_product_attention, mlx_lm.__version__
    before = function.__code__
    for version in ("0.31.2", "0.33.0", "1.0", "0.30.7rc1"):
        mlx_lm.__version__ = version
        words = assert_raises(unsupported, patch.install_pion_attention_patch)
        assert version in words
        assert ">= 0.31.3, < 0.33" in words
    mlx_lm.__version__ = found

    def scaled_dot_product_attention(queries, keys, values, scale, mask, bias=0):  # type: ignore
        return None

    base.scaled_dot_product_attention = scaled_dot_product_attention
    words = assert_raises(unsupported, patch.install_pion_attention_patch)
    assert "bias=0" in words
    assert "cache, scale, mask, sinks=None" in words
    base.scaled_dot_product_attention = function
    assert function.__code__ is before
    assert not patch.is_installed()
    assert_unpatched(base)


@ordering
def another_patcher_before_us_that_hides_the_original_is_refused() -> None:
    base, patch, llama = import_base(), import_patch(), import_model()

    def replaced(queries, keys, values, cache, scale, mask, sinks=None):  # type: ignore
        return queries

    base.scaled_dot_product_attention = replaced
    words = assert_raises(
        importlib.import_module("pion_patches._patch").PatchConflict,
        patch.install_pion_attention_patch,
    )
    assert "hides the original" in words
    assert not patch.is_installed()
    assert_unpatched(llama)


def run_forked(function: Callable[[], None]) -> str | None:
    """The traceback of ``function`` in a forked child, or None where it succeeded."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        verdict = "ok"
        try:
            function()
        except BaseException:
            verdict = traceback.format_exc()
        os.write(write_end, verdict.encode()[-60000:])
        os._exit(0)  # MLX may abort in an ordinary exit
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return None if said == "ok" else said or "the process died without a word"


def main() -> None:
    importlib.import_module("transformers")
    importlib.import_module("transformers.models.auto.tokenization_auto")
    assert not any(name.split(".")[0] in ("mlx", "mlx_lm") for name in sys.modules)
    sys.path.insert(0, str(PATCHES))
    print(json.dumps({name: run_forked(function) for name, function in ORDERINGS.items()}))


if __name__ == "__main__":
    main()
