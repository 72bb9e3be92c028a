"""What every patch is: guarded by version and signature, idempotent, reversible."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pion_patches._patch import (
    Patch,
    PatchConflict,
    UnsupportedVersion,
    require_signature,
    require_version,
)


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        ("0.31.3", True),
        ("0.31.2", False),
        ("0.31.10", True),
        ("0.32.2.dev1+g12", True),
        ("0.32", True),
        ("0.33", False),
        ("0.33.0rc1", False),
        ("1.0", False),
        ("", False),
        ("unknown", False),
    ],
)
def test_versions_compare_as_numbers_within_a_half_open_range(found: str, fits: bool) -> None:
    if fits:
        require_version("mlx-lm", found, "0.31.3", "0.33")
        return
    with pytest.raises(UnsupportedVersion) as caught:
        require_version("mlx-lm", found, "0.31.3", "0.33")
    assert caught.value.found == f"mlx-lm {found}"
    assert caught.value.required == "mlx-lm >= 0.31.3, < 0.33"


def template(a, b, c=None):  # type: ignore[no-untyped-def]
    """The expected parameters."""


def annotated(a: int, b: str, c: float | None = None) -> int:
    return 0


def renamed(a, x, c=None):  # type: ignore[no-untyped-def]
    pass


def other_default(a, b, c=0):  # type: ignore[no-untyped-def]
    pass


def keyword_only(a, b, *, c=None):  # type: ignore[no-untyped-def]
    pass


def one_more(a, b, c=None, d=None):  # type: ignore[no-untyped-def]
    pass


def test_a_signature_is_its_parameters_not_its_annotations() -> None:
    require_signature(annotated, template)


@pytest.mark.parametrize("function", [renamed, other_default, keyword_only, one_more])
def test_another_signature_is_refused_with_both_shown(function: Any) -> None:
    with pytest.raises(UnsupportedVersion) as caught:
        require_signature(function, template)
    assert caught.value.found.startswith(f"{function.__qualname__}(a, ")
    assert caught.value.required == f"{function.__qualname__}(a, b, c=None)"


class Switch(Patch):
    """A patch that turns something on."""

    name = "switch"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.on = self.unsupported = self.wrapped_over = False

    def check(self) -> None:
        self.calls.append("check")
        if self.unsupported:
            raise UnsupportedVersion("x 2", "x >= 1, < 2")

    def is_installed(self) -> bool:
        return self.on

    def apply(self) -> None:
        self.calls.append("apply")
        self.on = True

    def revert(self) -> None:
        if self.wrapped_over:
            raise PatchConflict("wrapped over")
        self.calls.append("revert")
        self.on = False


def test_installing_and_uninstalling_twice_acts_once() -> None:
    switch = Switch()
    switch.uninstall()
    switch.install()
    switch.install()
    switch.uninstall()
    switch.uninstall()
    assert switch.calls == ["check", "apply", "revert"]


def test_nothing_is_applied_where_the_check_fails() -> None:
    switch = Switch()
    switch.unsupported = True
    with pytest.raises(UnsupportedVersion, match="found x 2; required: x >= 1, < 2"):
        switch.install()
    assert switch.calls == ["check"]
    with pytest.raises(UnsupportedVersion), switch.installed():
        pytest.fail("the block ran")


def test_a_block_restores_what_was_there_even_after_an_error() -> None:
    switch = Switch()
    seen: dict[str, bool] = {}
    with pytest.raises(KeyError), switch.installed():
        seen["what is not there"]
    assert switch.calls == ["check", "apply", "revert"]
    assert not switch.on
    switch.install()
    with switch.installed():
        pass
    assert switch.on


def test_a_conflict_on_the_way_out_leaves_the_patch_in_force() -> None:
    switch = Switch()
    switch.install()
    switch.wrapped_over = True
    with pytest.raises(PatchConflict):
        switch.uninstall()
    assert switch.is_installed()


def test_threads_that_install_at_once_apply_it_once() -> None:
    switch = Switch()
    threads = [threading.Thread(target=switch.install) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert switch.calls == ["check", "apply"]
