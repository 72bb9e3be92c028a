"""What people install: every module once, typed, with its two commands."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
#: Import name to its folder in the repository.
PACKAGES = {
    "pion_vllm_mlx": REPOSITORY / "pion_vllm_mlx",
    "pion_server": REPOSITORY / "pion_server",
    "pion_patches": REPOSITORY / "patches" / "pion_patches",
    "pion_lmcache": REPOSITORY / "patches" / "pion_lmcache",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "-o", str(folder), str(REPOSITORY)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder


@pytest.fixture(scope="module")
def wheel_names(built: Path) -> list[str]:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        return wheel.namelist()


def source_files() -> list[str]:
    """Each file of the packages, data files too, as the path an installation has it at."""
    return sorted(
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    )


def packaged_among(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.partition("/")[0] in PACKAGES)


def test_wheel_holds_every_file_exactly_once(wheel_names: list[str]) -> None:
    assert packaged_among(wheel_names) == source_files()


def test_wheel_puts_no_generic_name_into_site_packages(wheel_names: list[str]) -> None:
    top = {name.partition("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)


def test_sdist_holds_every_file_exactly_once(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = [file.name.partition("/")[2] for file in sdist.getmembers() if file.isfile()]
    assert packaged_among(name.removeprefix("patches/") for name in names) == source_files()


@pytest.mark.parametrize("package", PACKAGES)
def test_types_reach_the_reader_of_every_package(package: str, wheel_names: list[str]) -> None:
    assert f"{package}/py.typed" in wheel_names


def test_text_the_demo_reads_is_packed(wheel_names: list[str]) -> None:
    assert "pion_vllm_mlx/handbook.txt" in wheel_names


def test_wheel_declares_both_commands(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt"))
        parser = ConfigParser()
        parser.read_string(wheel.read(name).decode())
    assert dict(parser["console_scripts"]) == {
        "pion-server": "pion_server.__main__:main",
        "pion-vllm-mlx": "pion_vllm_mlx.cli:main",
    }


def test_editable_install_has_one_copy_of_each_package(tmp_path: Path) -> None:
    """Imported from elsewhere, each package is the repository's, and no other folder has it."""
    code = (
        "import importlib.util as u, pathlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    print(pathlib.Path(u.find_spec(name).origin).parent)\n"
        "    found = {(pathlib.Path(p) / name).resolve() for p in sys.path}\n"
        "    print(len([p for p in found if p.is_dir()]))\n"
    )
    command = [sys.executable, "-c", code, *PACKAGES]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    expected = [line for folder in PACKAGES.values() for line in (str(folder), "1")]
    assert done.stdout.splitlines() == expected


def test_installed_commands_are_those_of_the_project() -> None:
    scripts = metadata.distribution("pion-vllm-mlx").entry_points.select(group="console_scripts")
    assert sorted(script.name for script in scripts) == ["pion-server", "pion-vllm-mlx"]
    for script in scripts:
        assert callable(script.load())
