"""Real Redis clients against our server, unmodified and with their default handshakes.

    python tests/interop/redis_versions.py [--venvs DIR]

Makes one virtual environment for each redis-py version (kept and reused under `--venvs`, else
temporary), starts a server with and one without a password, and runs the same script in each.
redis-cli and redis-benchmark take part where they are installed. Exits 0 if everything passed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSIONS = ("5.0.8", "6.4.0", "7.4.0", "8.1.0")
PASSWORD = "s3cret"

# Run by each version; argv: port, password or "".
CLIENT = """
import asyncio, sys
import redis, redis.asyncio, redis.backoff, redis.retry

port, password = int(sys.argv[1]), sys.argv[2] or None
rows = bytes(range(256)) * 8
once = redis.retry.Retry(redis.backoff.NoBackoff(), 0)


def check(what, got, expected):
    if got != expected:
        sys.exit(f"{what}: got {got!r}, expected {expected!r}")


def use(**options):
    r = redis.Redis(port=port, password=password, **options)
    check("ping", r.ping(), True)
    check("echo", r.echo(b"\\0\\r\\n"), b"\\0\\r\\n")
    check("client info", r.client_info()["id"], r.client_id())
    check("lib-ver", r.client_info()["lib-ver"], redis.__version__)
    check("setname", r.client_setname("me"), True)
    check("config", r.config_get("databases"), {"databases": "1"})
    check("info", r.info("server")["redis_version"], "7.0.0")
    check("commands", r.command_count() > 20, True)
    pipeline = r.pipeline(transaction=False)
    for i in range(2000):
        pipeline.echo(b"%d" % i)
    check("pipeline", pipeline.execute(), [b"%d" % i for i in range(2000)])
    r.execute_command("KV.PREFIX.DROP", "ns")
    check("lookup", r.execute_command("KV.PREFIX.LOOKUP", "ns"), b"MISS")
    check("register", r.execute_command("KV.PREFIX.REGISTER", "ns", 64, "fp16"), b"OK")
    check("store", r.execute_command(
        "V.STOREBATCH", "ns_pk", 0, 0, 16, rows, "FMT", "F16"), b"OK")
    check("fetch", r.execute_command(
        "V.FETCH", "ns_pk", 0, "RANGE", 0, 16, "FMT", "NATIVE"), rows)
    r.flushall()
    check("set", r.set("k", rows, ex=100, nx=True), True)
    check("get", [r.get("k"), r.mget("k", "none"), r.ttl("k")], [rows, [rows, None], 100])
    check("incr", [r.incr("n"), r.incrby("n", 41)], [1, 42])
    check("hset", r.hset("h", mapping={"a": rows, "b": b""}), 2)
    check("hgetall", r.hgetall("h"), {b"a": rows, b"b": b""})
    check("zadd", r.zadd("z", {"late": 1712345678.123456, "early": 0}), 2)
    check("zrange", [tuple(pair) for pair in r.zrange("z", 0, -1, withscores=True)],
          [(b"early", 0.0), (b"late", 1712345678.123456)])
    check("zscore", r.zscore("z", "late"), 1712345678.123456)
    check("scan", sorted(r.scan_iter(match="[hknz]", count=1)), [b"h", b"k", b"n", b"z"])
    check("type", r.type("z"), b"zset")
    check("keyspace", r.info("keyspace")["db0"]["keys"], 4)
    check("delete", r.delete("h", "z", "none"), 2)
    large = bytes(range(256)) * 20_000
    check("large", [r.set("large", large), r.get("large")], [True, large])
    check("exists", r.exists("large", "k", "h"), 2)
    try:
        r.execute_command("NO.SUCH")
    except redis.ResponseError as error:
        check("unknown", str(error), "unknown command 'NO.SUCH'")
    r.close()
    for wrong in ({"password": "wrong"}, {"username": "u", "password": "wrong"}):
        try:
            redis.Redis(port=port, retry=once, **wrong, **options).ping()
        except redis.AuthenticationError:
            continue
        sys.exit(f"{wrong} was let in")
    if password is not None:
        try:
            redis.Redis(port=port, retry=once, **options).ping()
        except redis.AuthenticationError:
            return
        sys.exit("no password was asked for")


async def use_asyncio():
    r = redis.asyncio.Redis(port=port, password=password)
    check("async", await r.ping(), True)
    check("async gather", await asyncio.gather(*(r.echo(b"%d" % i) for i in range(50))),
          [b"%d" % i for i in range(50)])
    await (r.aclose() if hasattr(r, "aclose") else r.close())


use()
use(protocol=2)
use(protocol=3)
asyncio.run(use_asyncio())
"""


@contextmanager
def run_server(home: Path, *flags: str) -> Iterator[int]:
    """A server on a free port; yields the port."""
    home.mkdir()
    launch = [sys.executable, "-m", "pion_server", "-p", "0", "--dir", str(home), *flags]
    with subprocess.Popen(launch, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ready = next((line for line in process.stdout if "ready on" in line), None)
            if ready is None:
                raise SystemExit("the server did not start")
            yield int(ready.split(" ready on ")[1].split()[0].rsplit(":", 1)[1])
        finally:
            process.terminate()


def make_venv(folder: Path, version: str) -> Path:
    """The Python of an environment that holds only redis-py `version`."""
    python = folder / f"redis-{version}" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", f"redis=={version}"]
        subprocess.run([*install, "--disable-pip-version-check"], check=True)
    return python


def run(what: str, words: list[str], expected: str | None = None) -> bool:
    """Run a client to its end; True if it succeeded and said what it should."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    passed = done.returncode == 0 and (expected is None or expected in done.stdout)
    print(f"{'ok  ' if passed else 'FAIL'}  {what}", flush=True)
    if not passed:
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
    return passed


def run_cli(port: int, locked: int) -> list[bool]:
    """redis-cli and redis-benchmark, where they are installed."""
    cli, benchmark = shutil.which("redis-cli"), shutil.which("redis-benchmark")
    results = []
    if cli is not None:
        plain, known = [cli, "-p", str(port)], [cli, "-p", str(locked), "-a", PASSWORD]
        results += [
            run("redis-cli PING", [*plain, "PING"], "PONG"),
            run("redis-cli -3 HELLO", [*plain, "-3", "HELLO", "3"], "proto"),
            run("redis-cli KV.PREFIX.INFO", [*plain, "KV.PREFIX.INFO"], "vstore_max_sessions:"),
            run("redis-cli COMMAND DOCS", [*plain, "-3", "COMMAND", "DOCS", "PING"], "summary"),
            run("redis-cli with a password", [*known, "PING"], "PONG"),
            run("redis-cli without it", [cli, "-p", str(locked), "PING"], "NOAUTH"),
            run("redis-cli -r 100", [*plain, "-r", "100", "PING"], "PONG"),
        ]
    if benchmark is not None:
        words = [benchmark, "-p", str(port), "-t", "ping,set,get", "-n", "5000"]
        words += ["-P", "16", "-q"]
        results.append(run("redis-benchmark ping, set, get", words, "requests per second"))
    if not results:
        print("skip  redis-cli is not installed")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venvs", type=Path, help="keep the environments here and reuse them")
    options, _ = parser.parse_known_args()
    results: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="pion-interop-") as name:
        temporary = Path(name)
        with (
            run_server(temporary / "open") as port,
            run_server(temporary / "locked", "--requirepass", PASSWORD) as locked,
        ):
            for version in VERSIONS:
                python = str(make_venv(options.venvs or temporary, version))
                for which, password in ((port, ""), (locked, PASSWORD)):
                    what = f"redis-py {version}{' with a password' if password else ''}"
                    results.append(run(what, [python, "-c", CLIENT, str(which), password]))
            results += run_cli(port, locked)
    print(f"{sum(results)} of {len(results)} passed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
