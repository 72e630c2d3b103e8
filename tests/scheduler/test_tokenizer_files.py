"""Files of a model that are missing, broken or of another kind: a sentence for each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_svc.text.tokenizer import Tokenizer
from scheduler_svc.text.tokenizer_files import read_json, read_tokenizer
from tests.support.small_tokenizers import chat

ROOT = Path(__file__).resolve().parents[2]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2103\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chat().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("others", [[], ["tokenizer.model"], ["vocab.json"], ["tekken.json"]])
def test_only_tokenizer_json_is_read(tmp_path: Path, others: list[str]) -> None:
    """What transformers makes of the others depends on what is installed beside it."""
    for name in others:
        (tmp_path / name).write_bytes(b"\x0a\x0e")
    with pytest.raises(ValueError, match=r"no tokenizer\.json") as error:
        read_tokenizer(str(tmp_path))
    if others:
        assert f"there is {others[0]}, but" in str(error.value)
        assert "AutoTokenizer.from_pretrained" in str(error.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (POINTER.encode(), "is a Git LFS pointer.*git lfs pull"),
        (b"", "is empty"),
        (b'{"version": "1.0", "model": {"vocab": {"a"', "is not JSON, or was cut off"),
        (b"[" * 100_000, "is not JSON, or was cut off"),
        (b"\xff\xfe{}", "is not UTF-8"),
        (b"[1]", "holds a list; allowed: a JSON object"),
    ],
)
def test_a_broken_file_of_the_tokenizer(folder: Path, name: str, content: bytes, why: str) -> None:
    """The libraries' own errors name neither the file nor what to do, and are of any type."""
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{name} {why}"):
        read_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer.json", '{"version": "9", "model": 5}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 5}}'),
        ("tokenizer_config.json", '{"eos_token": 5}'),
    ],
)
def test_a_tokenizer_of_an_unforeseen_form(folder: Path, name: str, content: str) -> None:
    """JSON that the libraries do not understand: any exception, panics too, becomes a sentence."""
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=r"cannot be loaded from tokenizer\.json and"):
        read_tokenizer(str(folder))


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (POINTER.encode(), "is a Git LFS pointer"),
        (b" \n", "is empty"),
        (b"null", "holds null; allowed: a JSON object"),
        (b'"x"', "holds a string"),
        (b"\xff", "is not UTF-8"),
        (b'{"top_k": 1', "is not JSON, or was cut off"),
        (b'{"top_k": 1' + b"0" * 5000 + b"}", "is not JSON"),
        (b" " * (17 << 20), r"has 17825792 bytes; allowed: up to"),
    ],
)
def test_a_broken_configuration(folder: Path, name: str, content: bytes, why: str) -> None:
    """Taken as missing, the model would be served with other defaults than its makers state."""
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{name} {why}"):
        Tokenizer.load(str(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_link_to_nothing_is_not_a_missing_file(folder: Path, name: str) -> None:
    """A copy of a cache without its blobs: the model would be served with other defaults."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../../blobs/4d7a")
    with pytest.raises(ValueError, match=f"^{name} is a broken link"):
        Tokenizer.load(str(folder))


def test_a_template_that_is_a_pointer(folder: Path) -> None:
    """It is a template, too: each chat would be answered as if the pointer had been asked."""
    assert (folder / "chat_template.jinja").exists()
    (folder / "chat_template.jinja").write_text(POINTER)
    with pytest.raises(ValueError, match=r"^chat_template\.jinja is a Git LFS pointer"):
        read_tokenizer(str(folder))
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"tokenizer\.json and the files beside it.*Unicode"):
        read_tokenizer(str(folder))


def test_a_byte_order_mark_is_none_of_the_content(folder: Path) -> None:
    """Editors on Windows write one."""
    (folder / "generation_config.json").write_bytes(b'\xef\xbb\xbf{"top_k": 5}')
    assert read_json(str(folder), "generation_config.json") == {"top_k": 5}
    assert read_json(str(folder), "config.json") is None


def test_code_that_comes_with_a_model_is_not_run(folder: Path) -> None:
    """Nor may anybody be asked about it: a service has nobody who answers."""
    (folder / "evil.py").write_text("raise SystemExit('code of the model was run')")
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text(
            '{"model_type": "evil", "tokenizer_class": "Evil", "eos_token": "<|im_end|>", '
            '"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.E"}}'
        )
    assert Tokenizer.load(str(folder)).eos_token_ids == (257,)


def test_a_tokenizer_may_be_asked_for_while_imports_run(folder: Path) -> None:
    """A worker that still holds its model answers a restarted scheduler at once: transformers is
    then being imported, and half a module must not reach who reads the tokenizer."""
    code = f"""
import time
from scheduler_svc.text.tokenizer import Tokenizer
from scheduler_svc.text.tokenizer_files import import_ahead
import_ahead()
time.sleep(0.05)
Tokenizer.load({str(folder)!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)


def test_a_process_that_ends_does_not_wait_for_imports() -> None:
    """Nor does it show their traceback: whoever mistyped the port would seek the cause in it."""
    code = """
import sys
from scheduler_svc.text.tokenizer_files import import_ahead
import_ahead()
print("no port", file=sys.stderr)
sys.exit(2)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (2, "no port\n")


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_user_without_home_and_name(folder: Path, tmp_path: Path) -> None:
    """Containers run as a bare number; nothing here may look for a home folder."""
    code = f"""
from scheduler_svc.settings.config import Config, prepare_worker_address
from scheduler_svc.text.tokenizer import Tokenizer
prepare_worker_address(Config().worker_address)
Tokenizer.load({str(folder)!r}).encode("hello")
"""
    environ = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    as_nobody = ["unshare", "--user", "--map-user=12345"]
    if subprocess.run([*as_nobody, "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces of users are not allowed here")
    subprocess.run(
        [*as_nobody, sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT, env=environ
    )
