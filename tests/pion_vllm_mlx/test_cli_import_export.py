"""`import` and `export`: prompt cache files of mlx-lm, in both directions, and every refusal."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.models import cache as mlx_lm_caches

from pion_vllm_mlx import PionPromptCache, cli
from tests.pion_patches.shipping import continuation, token_ids
from tests.pion_vllm_mlx.model_folder import text_of, write_model

Server = Any
_stock: Any = mlx_lm_caches  # mlx-lm is not typed
load_prompt_cache, make_prompt_cache = _stock.load_prompt_cache, _stock.make_prompt_cache
save_prompt_cache = _stock.save_prompt_cache
TOKENS = 40
IDS = token_ids(0, TOKENS)
CALLS = (4, 1, 1)
PATIENT = 20.0


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    log = logging.getLogger("pion_vllm_mlx")
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of plain caches, one of windows with a chat template, a recurrent one; and others."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "llama", "llama")
    write_model(folder / "llama-other", "llama", seed=2)
    write_model(folder / "llama-bf16", "llama", dtype=mx.bfloat16)
    write_model(folder / "gemma3_text", "gemma3_text", chat=True)
    write_model(folder / "mamba2", "mamba2")
    write_model(folder / "wide", "llama", head_dim=32)
    return folder


@pytest.fixture(scope="module")
def llama(folders: Path) -> Any:
    return load(str(folders / "llama"))[0]


class Command:
    """Runs subcommands against one server; keeps what they printed."""

    def __init__(self, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
        self.server, self._capsys = server, capsys
        self.errors = ""

    def __call__(self, *words: object) -> str:
        """One that must succeed; its line of output."""
        self._capsys.readouterr()
        assert cli.main([*map(str, words), "--port", str(self.server.port)]) == 0
        said = self._capsys.readouterr()
        self.errors = said.err
        assert said.out.count("\n") == 1
        return said.out.strip()

    def refused(self, *words: object) -> str:
        """One that must fail with one line, which argparse's caller prints, and status 1."""
        with pytest.raises(SystemExit) as caught:
            cli.main([*map(str, words), "--port", str(self.server.port)])
        assert isinstance(caught.value.code, str)  # printed to stderr, status 1
        assert "\n" not in caught.value.code
        assert caught.value.code.startswith(f"pion-vllm-mlx {words[0]}: ")
        return caught.value.code


@pytest.fixture
def command(shared: Server, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(shared, capsys)


def cache_prompt(model: Path, text: str, file: Path, *more: str) -> None:
    """mlx-lm's own command."""
    words = ["mlx_lm.cache_prompt", "--model", str(model), "--prompt", text]
    words += ["--prompt-cache-file", str(file), *more]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        importlib.import_module("mlx_lm.cache_prompt").main()


def write_file(model: Any, file: Path, ids: list[int] = IDS, step: int = 2048) -> None:
    """What `mlx_lm` users write who prefill by themselves."""
    cache = make_prompt_cache(model)
    for start in range(0, len(ids), step):
        model(mx.array([ids[start : start + step]]), cache=cache)
    save_prompt_cache(str(file), cache, {"model": "mine"})


def bits(model: Any, cache: list[Any], start: int = TOKENS) -> bytes:
    return continuation("", model, cache, start, CALLS).tobytes()


def fetch(server: Server, model: Any, namespace: str, ids: list[int] = IDS) -> bytes:
    """A hit of a client of its own, continued."""
    with PionPromptCache(model, port=server.port, timeout=PATIENT, store="sync") as pc:
        cache = pc.get_or_prefill(ids, namespace)
        assert pc.stats()["hits"] == 1, pc.stats()["miss_reasons"]
        return bits(model, cache, len(ids))


def put(server: Server, model: Any, namespace: str, ids: list[int] = IDS, **how: Any) -> list[Any]:
    with PionPromptCache(model, port=server.port, timeout=PATIENT, store="sync", **how) as pc:
        cache = pc.get_or_prefill(ids, namespace)
        assert pc.stats()["stores"] == 1
        return cache


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2"])
def test_a_file_of_mlx_lm_becomes_a_prefix_that_continues_as_the_file(
    command: Command, shared: Server, folders: Path, namespace: str, tmp_path: Path, family: str
) -> None:
    """Its prompt names the tokens, chat template included."""
    file, folder = tmp_path / "prompt.safetensors", folders / family
    cache_prompt(folder, text_of(IDS), file)
    names = ("--model", folder, "--namespace", namespace)
    said = command("import", file, *names, "--prompt", text_of(IDS))
    ids = [1, *IDS] if family == "gemma3_text" else IDS
    assert said.startswith(f"stored {len(ids)} tokens (")
    assert f"computing {len(ids)} tokens" in command.errors
    model = load(str(folder))[0]
    loaded = bits(model, load_prompt_cache(str(file)), len(ids))
    assert fetch(shared, model, namespace, ids) == loaded


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2"])
def test_an_exported_prefix_is_loaded_by_mlx_lm_and_continues_bit_for_bit(
    command: Command, shared: Server, folders: Path, namespace: str, tmp_path: Path, family: str
) -> None:
    file, folder = tmp_path / "prompt.safetensors", folders / family
    model = load(str(folder))[0]
    cold = bits(model, put(shared, model, namespace))
    said = command("export", file, "--model", folder, "--namespace", namespace)
    assert said == f"wrote 40 tokens ({file.stat().st_size:,} bytes) to {file}"
    cache, metadata = load_prompt_cache(str(file), return_metadata=True)
    assert bits(model, cache) == cold
    assert metadata["model"] == str(folder)
    assert json.loads(metadata["pion_tokens"]) == IDS
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2"])
def test_there_and_back_needs_no_tokens_and_keeps_every_bit(
    command: Command, shared: Server, folders: Path, namespace: str, tmp_path: Path, family: str
) -> None:
    file, folder = tmp_path / "prompt.safetensors", folders / family
    model = load(str(folder))[0]
    cold = bits(model, put(shared, model, namespace, prefill_step_size=16))
    command("export", file, "--model", folder, "--namespace", namespace)
    for how in ([], ["--trust", "--force"]):
        command("import", file, "--model", folder, "--namespace", f"{namespace}-back", *how)
        assert ("computing" in command.errors) == (how == [])
        assert fetch(shared, model, f"{namespace}-back") == cold


def test_codes_of_kv_bits_travel_as_they_are(
    command: Command, shared: Server, folders: Path, namespace: str, tmp_path: Path
) -> None:
    """A quantised file of mlx-lm: needs trust, becomes a prefix, and comes back the same."""
    file, back, folder = tmp_path / "a.safetensors", tmp_path / "b.safetensors", folders / "wide"
    model = load(str(folder))[0]
    made = ("--kv-bits", "4", "--kv-group-size", "32")
    cache_prompt(folder, text_of(IDS), file, *made, "--quantized-kv-start", "0")
    names = ("--model", folder, "--namespace", namespace)
    words = ("import", file, *names, "--prompt", text_of(IDS))
    assert "--trust" in command.refused(*words, *made)
    assert "does not fit" in command.refused(*words)
    assert "kv_bits is None or one of" in command.refused(*words, "--kv-bits", "7", "--trust")
    command(*words, *made, "--trust")
    loaded = bits(model, load_prompt_cache(str(file)))
    settings: dict[str, Any] = {"kv_bits": 4, "kv_group_size": 32}
    with PionPromptCache(model, port=shared.port, timeout=PATIENT, store="sync", **settings) as pc:
        assert bits(model, pc.get_or_prefill(IDS, namespace)) == loaded
        assert pc.stats()["hits"] == 1
    command("export", back, *names)
    assert bits(model, load_prompt_cache(str(back))) == loaded


def test_mlx_lm_generate_takes_an_exported_file(
    command: Command, shared: Server, folders: Path, llama: Any, namespace: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.safetensors"
    put(shared, llama, namespace)
    command("export", file, "--model", folders / "llama", "--namespace", namespace)
    words = ["mlx_lm.generate", "--prompt-cache-file", str(file), "--prompt", "w5 w6"]
    words += ["--max-tokens", "4", "--temp", "0", "--verbose", "False", "--ignore-chat-template"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(sys, "argv", words)
        importlib.import_module("mlx_lm.generate").main()
    with PionPromptCache(llama, port=shared.port, timeout=PATIENT, store="sync") as pc:
        cache = pc.get_or_prefill(IDS, namespace)
    tokens, step = [], mx.array([[5, 6]])
    for _ in range(4):
        tokens.append(int(mx.argmax(llama(step, cache=cache)[0, -1])))
        step = mx.array([tokens[-1:]])
    assert text_of(tokens) in said.getvalue()


@pytest.mark.parametrize("how", ["--tokens", "--tokens-file", "--tokens-file as JSON", "-"])
def test_tokens_are_given_in_several_ways(
    command: Command,
    shared: Server,
    folders: Path,
    llama: Any,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    file, plain = tmp_path / "prompt.safetensors", tmp_path / "ids"
    write_file(llama, file)
    plain.write_text(json.dumps(IDS) if "JSON" in how else " ".join(map(str, IDS)))
    monkeypatch.setattr(sys, "stdin", io.StringIO(text_of(IDS)))
    option = {"--tokens": ("--tokens", str(IDS)[1:-1]), "-": ("--prompt", "-")}
    words = option.get(how, ("--tokens-file", plain))
    command("import", file, "--model", folders / "llama", "--namespace", namespace, *words)
    with PionPromptCache(llama, port=shared.port, timeout=PATIENT, store="sync") as pc:
        assert pc.lookup(namespace)
    assert fetch(shared, llama, namespace) == bits(llama, load_prompt_cache(str(file)))


def test_a_prefill_of_other_chunks_is_taken_for_what_it_is(
    command: Command, folders: Path, llama: Any, namespace: str, tmp_path: Path
) -> None:
    """What a file holds differs in its last bits from what is computed to compare it with."""
    for number, (name, step) in enumerate([("llama", 7), ("llama-bf16", 7), ("gemma3_text", 3)]):
        model = load(str(folders / name))[0]
        file = tmp_path / f"{name}.safetensors"
        write_file(model, file, step=step)
        names = ("--model", folders / name, "--namespace", f"{namespace}{number}")
        command("import", file, *names, "--tokens", str(IDS)[1:-1])


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (IDS[:-1], "holds 40 tokens, not 39"),
        ([*IDS, 3], "holds 40 tokens, not 41"),
        ([*IDS[:-1], IDS[-1] ^ 1], "not what this model computes"),
        ([IDS[0] ^ 1, *IDS[1:]], "not what this model computes"),
        ([*IDS[:20], IDS[20] ^ 1, *IDS[21:]], "not what this model computes"),
        ([*IDS[:-1], 199], "token id 199 is not in 0..198"),
        ([], "one token at least"),
    ],
)
def test_other_tokens_than_the_files_are_refused(
    command: Command,
    shared: Server,
    folders: Path,
    llama: Any,
    namespace: str,
    tmp_path: Path,
    ids: list[int],
    reason: str,
) -> None:
    file, given = tmp_path / "prompt.safetensors", tmp_path / "ids"
    write_file(llama, file)
    given.write_text(json.dumps(ids))
    names = ("--model", folders / "llama", "--namespace", namespace)
    assert reason in command.refused("import", file, *names, "--tokens-file", given)
    assert shared.client().call("KV.PREFIX.META", namespace, "GET") is None


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_another_model_of_the_same_shape_is_refused(
    command: Command, folders: Path, namespace: str, tmp_path: Path, family: str
) -> None:
    """E13: nothing in a file of mlx-lm says which weights it is of; the comparison does."""
    other = tmp_path / "other"
    write_model(other, family, seed=3)
    file = tmp_path / "prompt.safetensors"
    write_file(load(str(other))[0], file)
    names = ("--model", folders / family, "--namespace", namespace)
    said = command.refused("import", file, *names, "--tokens", str(IDS)[1:-1])
    assert "not what this model computes" in said


@pytest.mark.parametrize("place", [0, 20, TOKENS - 1])
def test_one_other_token_shows_in_half_precision_too(
    command: Command, folders: Path, namespace: str, tmp_path: Path, place: int
) -> None:
    file, folder = tmp_path / "prompt.safetensors", folders / "llama-bf16"
    write_file(load(str(folder))[0], file)
    ids = [token ^ (number == place) for number, token in enumerate(IDS)]
    names = ("--model", folder, "--namespace", namespace)
    said = command.refused("import", file, *names, "--tokens", str(ids)[1:-1])
    assert "not what this model computes" in said


@pytest.mark.parametrize("trust", [[], ["--trust"]])
def test_an_exported_file_knows_its_model_and_tokens(
    command: Command,
    shared: Server,
    folders: Path,
    llama: Any,
    namespace: str,
    tmp_path: Path,
    trust: list[str],
) -> None:
    file = tmp_path / "prompt.safetensors"
    put(shared, llama, namespace)
    command("export", file, "--model", folders / "llama", "--namespace", namespace)
    other = ("--model", folders / "llama-other", "--namespace", f"{namespace}-2")
    assert "other weights" in command.refused("import", file, *other, *trust)
    same = ("--model", folders / "llama", "--namespace", f"{namespace}-2")
    words = ("--tokens", "1,2,3")
    assert "for other tokens" in command.refused("import", file, *same, *words, *trust)


def test_a_file_that_says_no_tokens_needs_them(
    command: Command, folders: Path, llama: Any, namespace: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.safetensors"
    write_file(llama, file)
    names = ("--model", folders / "llama", "--namespace", namespace)
    assert "give --prompt, --tokens or --tokens-file" in command.refused("import", file, *names)


def test_a_prefix_on_the_server_is_replaced_only_by_force(
    command: Command, shared: Server, folders: Path, llama: Any, namespace: str, tmp_path: Path
) -> None:
    other, file = [7, *IDS[1:]], tmp_path / "prompt.safetensors"
    put(shared, llama, namespace, other)
    write_file(llama, file)
    names = ("--model", folders / "llama", "--namespace", namespace)
    words = ("import", file, *names, "--tokens", str(IDS)[1:-1])
    assert "--force replaces it" in command.refused(*words)
    fetch(shared, llama, namespace, other)
    command(*words, "--force")
    fetch(shared, llama, namespace)


def test_a_file_is_replaced_only_by_force(
    command: Command, shared: Server, folders: Path, llama: Any, namespace: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.safetensors"
    file.write_text("precious")
    put(shared, llama, namespace)
    words = ("export", file, "--model", folders / "llama", "--namespace", namespace)
    assert "--force replaces it" in command.refused(*words)
    assert file.read_text() == "precious"
    command(*words, "--force")
    assert len(load_prompt_cache(str(file))) == 4


def test_export_refuses_what_it_cannot_vouch_for(
    command: Command, shared: Server, folders: Path, llama: Any, namespace: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.safetensors"
    same = ("--model", folders / "llama", "--namespace", namespace)
    other = ("--model", folders / "llama-other", "--namespace", namespace)
    assert "no prefix of that name" in command.refused("export", file, *same)
    put(shared, llama, namespace)
    assert "another model" in command.refused("export", file, *other)
    words = ("--tokens", f"7,{str(IDS[1:])[1:-1]}")
    assert "for other tokens" in command.refused("export", file, *same, *words)
    assert "for other tokens" in command.refused("export", file, *same, "--prompt", "w1")
    lossy = ("--model", folders / "llama", "--namespace", f"{namespace}-lossy")
    put(shared, llama, f"{namespace}-lossy", vquant="fp16")
    assert "stored as fp16" in command.refused("export", file, *lossy)
    assert "no folder" in command.refused("export", tmp_path / "absent" / "x", *same)
    assert list(tmp_path.iterdir()) == []


def test_an_export_saves_no_prefill_and_is_not_counted_as_one(
    command: Command, shared: Server, folders: Path, llama: Any, namespace: str, tmp_path: Path
) -> None:
    put(shared, llama, namespace)
    before = shared.client().call("PION.STATS")
    names = ("--model", folders / "llama", "--namespace", namespace)
    command("export", tmp_path / "x.safetensors", *names)
    after = shared.client().call("PION.STATS")
    for stats in (before, after):
        del stats[stats.index(b"uptime_in_seconds") + 1]
        del stats[stats.index(b"kvprefix_bytes_served") + 1]
    assert after == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "no prompt cache"),
        (b"precious", "no prompt cache"),
        ((1 << 63).to_bytes(8, "little"), "no prompt cache"),
        (b"\x02\0\0\0\0\0\0\0{}", "does not fit"),
    ],
)
def test_a_file_that_is_no_prompt_cache_is_refused(
    command: Command,
    folders: Path,
    namespace: str,
    tmp_path: Path,
    content: bytes | None,
    reason: str,
) -> None:
    """E18."""
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    names = ("--model", folders / "llama", "--namespace", namespace, "--tokens", "1,2")
    assert reason in command.refused("import", file, *names)


def test_a_file_for_another_kind_of_model_is_refused(
    command: Command, folders: Path, llama: Any, namespace: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.safetensors"
    write_file(llama, file)
    words = ("--namespace", namespace, "--tokens", str(IDS)[1:-1])
    for family in ("mamba2", "gemma3_text"):
        said = command.refused("import", file, "--model", folders / family, *words)
        assert f"{file} does not fit: " in said


@pytest.mark.parametrize("name", ["import", "export"])
def test_server_or_model_that_is_not_there_is_one_line(
    command: Command, folders: Path, llama: Any, namespace: str, tmp_path: Path, name: str
) -> None:
    file, absent = tmp_path / "prompt.safetensors", tmp_path / "absent"
    if name == "import":
        write_file(llama, file)
    else:
        put(command.server, llama, namespace)
        with PionPromptCache(llama, port=command.server.port, timeout=PATIENT, store="sync") as pc:
            assert pc.lookup(namespace)
    words = (name, file, "--namespace", namespace, "--tokens", "1,2")
    assert f"cannot load {absent}: " in command.refused(*words, "--model", absent)
    command.server = type("Nobody", (), {"port": 1})
    assert "refused" in command.refused(*words, "--model", folders / "llama")


def test_a_password_comes_from_a_file(
    server: Callable[..., Server],
    capsys: pytest.CaptureFixture[str],
    folders: Path,
    llama: Any,
    tmp_path: Path,
) -> None:
    command = Command(server("--requirepass", "open sesame"), capsys)
    file, right, wrong = tmp_path / "prompt.safetensors", tmp_path / "right", tmp_path / "wrong"
    write_file(llama, file)
    right.write_text("open sesame\n")
    wrong.write_text("open barley\n")
    names = ("--model", folders / "llama", "--namespace", "ns", "--tokens", str(IDS)[1:-1])
    assert "NOAUTH" in command.refused("import", file, *names)
    assert "WRONGPASS" in command.refused("import", file, *names, "--password-file", wrong)
    absent = tmp_path / "absent"
    assert "cannot read" in command.refused("import", file, *names, "--password-file", absent)
    command("import", file, *names, "--password-file", right)
    command("export", file, *names, "--password-file", right, "--force")


def test_a_full_server_is_one_line(
    server: Callable[..., Server],
    capsys: pytest.CaptureFixture[str],
    folders: Path,
    llama: Any,
    tmp_path: Path,
) -> None:
    command = Command(server("--maxmemory", "1kb"), capsys)
    file = tmp_path / "prompt.safetensors"
    write_file(llama, file)
    names = ("--model", folders / "llama", "--namespace", "ns", "--tokens", str(IDS)[1:-1])
    assert "OOM" in command.refused("import", file, *names)
    assert command.server.client().call("KV.PREFIX.META", "ns", "GET") is None


@pytest.mark.parametrize(
    "words",
    [
        ["import"],
        ["import", "file", "--namespace", "x"],
        ["export", "file", "--model", "m"],
        ["import", "file", "--model", "m", "--namespace", "x", "--tokens", "1,two"],
        ["import", "file", "--model", "m", "--namespace", "x", "--tokens", "[1, true]"],
        ["import", "file", "--model", "m", "--namespace", "x", "--tokens", "1", "--prompt", "x"],
        ["export", "file", "--model", "m", "--namespace", "x", "--port", "0"],
    ],
)
def test_wrong_usage_is_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: pion-vllm-mlx" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["import", "export"])
def test_a_namespace_out_of_bounds_is_one_line(
    command: Command, llama: Any, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "prompt.safetensors"
    if name == "import":
        write_file(llama, file)
    for namespace in ("", "x" * 201):
        said = command.refused(name, file, "--model", "m", "--namespace", namespace)
        assert "1 to 200 bytes" in said
