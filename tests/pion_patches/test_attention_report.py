"""The seam report: versions, signature, and which loaded model modules are reached."""

from __future__ import annotations

import importlib

import mlx_lm
import pytest

from pion_patches.attention import pion_attention_patch
from pion_patches.seam_report import seam_report


def test_the_report_names_versions_and_what_is_reached_and_what_is_not() -> None:
    for name in ("llama", "llama4", "gemma2", "plamo2", "mamba"):
        importlib.import_module(f"mlx_lm.models.{name}")
    report = seam_report()
    assert report.mlx_lm == mlx_lm.__version__
    assert report.problem is None
    assert not report.installed
    assert report.signature.startswith("(queries, keys, values, cache, scale")
    assert {"mlx_lm.models.llama", "mlx_lm.models.llama4"} <= set(report.reached)
    assert not {"mlx_lm.models.gemma2", "mlx_lm.models.mamba"} & set(report.reached)
    assert report.bypassing["mlx_lm.models.gemma2"].endswith("computes its own softmax")
    assert "mx.fast" in report.bypassing["mlx_lm.models.plamo2"]
    # Both use other things of mx.fast, and attention by name.
    assert not {"mlx_lm.models.llama", "mlx_lm.models.llama4"} & set(report.bypassing)


def test_the_report_says_whether_the_patch_is_in_force() -> None:
    importlib.import_module("mlx_lm.models.llama")
    with pion_attention_patch():
        report = seam_report()
        assert report.installed
        assert "\ninstalled\n" in str(report)
        assert report.problem is None
        assert "mlx_lm.models.llama" in report.reached
    assert "not installed (it can be)" in str(seam_report())


def test_the_report_says_why_the_patch_cannot_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_lm, "__version__", "0.40.0")
    report = seam_report()
    assert report.problem == "found mlx-lm 0.40.0; required: mlx-lm >= 0.31.3, < 0.33"
    assert report.problem in str(report)
