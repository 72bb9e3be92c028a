"""LMCache 0.5.6's own acceptance commands against our server: its stock connectors and our plugins.

    python tests/interop/lmcache_acceptance.py [--venv DIR]

Makes a virtual environment with torch for the CPU and LMCache (1.5 GB; kept under `--venv`,
`.venv-lmcache` unless told otherwise), starts a server, and runs `lmcache.v1.basic_check` in its
modes `test_remote` and `test_l2_adapter` and `lmcache bench l2` with verification, for each door:
`resp://`, `redis://`, `pion://`, the RESP L2 adapter and ours. Exits 0 if everything passed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.interop.redis_versions import run_server  # noqa: E402

VERSION: Final = "0.5.6"
TORCH: Final = "torch==2.13.0"
# What LMCache imports on a CPU; its own list asks for CUDA, cloud clients and more.
NEEDED: Final = (
    "aiofile", "aiofiles", "aiohttp", "blake3", "cachetools", "cryptography", "fastapi", "httpx",
    "msgspec", "numpy<=2.2.6", "numba", "opentelemetry-api<=1.40.0", "opentelemetry-sdk",
    "opentelemetry-exporter-prometheus<=0.61b0", "prometheus_client<=0.24.1", "psutil",
    "py-cpuinfo", "pytest", "pyyaml", "pyzmq>=25", "redis", "requests", "safetensors",
    "sortedcontainers", "transformers>=5.4", "uvicorn", "grpcio", "protobuf<7,>=6.31.1",
)  # fmt: skip
SECONDS: Final = 240.0
# A row of LMCache's table of results: operation, three times, passed/all.
_ROW = re.compile(r"^\| ([A-Z]+(?: \([a-z-]+\))?) +\|(?:[^|]*\|){3} +(\d+)/(\d+) \|", re.MULTILINE)


def make_venv(folder: Path) -> Path:
    """The Python of an environment with LMCache, made on first use."""
    python = folder / "bin" / "python"
    made = folder / f".lmcache-{VERSION}"
    if not made.exists():
        print(f"Installing LMCache {VERSION} and torch into {folder}: some minutes", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, TORCH], check=True)
        subprocess.run([*pip, "--no-deps", f"lmcache=={VERSION}"], check=True)
        subprocess.run([*pip, *NEEDED], check=True)
        made.touch()
    return python


class Program:
    """One of LMCache's programs, in its environment, our plugins on its path."""

    def __init__(self, python: Path, home: Path) -> None:
        self._python = python
        self._home = home

    def run(self, words: list[str], done: str, env: Mapping[str, str] | None = None) -> str:
        """What it printed up to a line with `done` in it; some of them never end by themselves."""
        path = f"{ROOT}{os.pathsep}{ROOT / 'patches'}"
        inherited = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        process = subprocess.Popen(
            [str(self._python), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._home,
            env={**inherited, "PYTHONPATH": path, **(env or {})},
        )
        watchdog = threading.Timer(SECONDS, process.kill)
        watchdog.start()
        lines: list[str] = []
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.append(line)
                if done in line:
                    break
        watchdog.cancel()
        process.kill()
        process.wait()
        return "".join(lines)

    def check_remote(self, url: str) -> str:
        """`basic_check --mode test_remote` with a configuration of its own."""
        config = [
            "chunk_size: 256", "local_cpu: false", "max_local_cpu_size: 1", "remote_serde: naive",
            f"remote_url: {url}",
        ]  # fmt: skip
        if url.startswith("pion://"):
            plugin = "remote_storage_plugin.pion"
            config += [
                "remote_storage_plugins: [pion]",
                "extra_config:",
                f"  {plugin}.module_path: pion_lmcache.connector",
                f"  {plugin}.class_name: PionConnectorAdapter",
            ]
        file = self._home / "config.yaml"
        file.write_text("\n".join(config) + "\n")
        words = ["-m", "lmcache.v1.basic_check", "--mode", "test_remote"]
        return self.run(words, "| GET ", {"LMCACHE_CONFIG_FILE": str(file)})

    def check_l2(self, adapter: Mapping[str, object]) -> str:
        """`basic_check --mode test_l2_adapter`."""
        words = ["-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter"]
        return self.run([*words, "--l2-adapter", json.dumps(adapter)], "| LOAD ")

    def bench_l2(self, adapter: Mapping[str, object]) -> str:
        """`lmcache bench l2 --no-skip-verify`, objects of 4 MB."""
        program = str(self._python.with_name("lmcache"))
        options = ["--no-skip-verify", "--num-keys", "8", "--data-size-kb", "4096"]
        words = [program, "bench", "l2", "--l2-adapter", json.dumps(adapter), *options]
        return self.run(words, "[Cleanup] Done")


def all_passed(text: str, operations: int) -> bool:
    """Whether the table has so many rows, every row says that all passed, and so does what is
    said about contents."""
    rows = [(passed, of) for _, passed, of in _ROW.findall(text)]
    contents = re.findall(r"Validation \(content[a-z ]*\): (\d+)/(\d+)", text)
    return (
        len(rows) == operations
        and bool(contents)
        and all(passed == of != "0" for passed, of in rows + contents)
    )


def bench_passed(text: str) -> bool:
    """Whether all stores and loads succeeded and what came back was compared."""
    successes = re.findall(r"Operation: +(\w+)\n(?:.*\n)*?Total success: +(\d+)\n", text)
    found = dict(successes)
    return found.get("Store") == found.get("Load") == "8" and "8 keys data verified OK" in text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-lmcache")
    options, _ = parser.parse_known_args()
    python = make_venv(options.venv.absolute())
    results: list[bool] = []

    def note(what: str, passed: bool, text: str) -> None:
        print(f"{'ok  ' if passed else 'FAIL'}  {what}", flush=True)
        if not passed:
            print(text[-3000:])
        results.append(passed)

    with tempfile.TemporaryDirectory(prefix="pion-lmcache-") as name:
        home = Path(name)
        with run_server(home / "data") as port:
            program = Program(python, home)
            for scheme in ("resp", "redis", "pion"):
                text = program.check_remote(f"{scheme}://127.0.0.1:{port}")
                note(f"test_remote {scheme}://", all_passed(text, 4), text)
            plugin = {
                "type": "plugin",
                "module_path": "pion_lmcache.l2_adapter",
                "class_name": "PionL2Adapter",
                "adapter_params": {"url": f"pion://127.0.0.1:{port}"},
            }
            resp = {"type": "resp", "host": "127.0.0.1", "port": port}
            for what, adapter in (("resp", resp), ("our plugin", plugin)):
                text = program.check_l2(adapter)
                note(f"test_l2_adapter {what}", all_passed(text, 4), text)
                text = program.bench_l2(adapter)
                note(f"bench l2 {what}", bench_passed(text), text)
    print(f"{sum(results)} of {len(results)} passed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
