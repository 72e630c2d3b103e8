"""README says what is true: its configuration table, its example, its commands."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

from client import Chairlift, cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_configuration_table_is_complete() -> None:
    """A key that is missing there is one that nobody finds; a wrong default is worse."""
    from scheduler_svc.settings.config import Config

    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", README, re.MULTILINE)
    defaults = [(field.name, shown(field.default)) for field in dataclasses.fields(Config)]
    assert rows == defaults


def shown(default: object) -> str:
    """As the table writes it."""
    if default is None or default == "":
        return "–"  # noqa: RUF001  # a dash stands for "nothing" in the table
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def test_the_python_example_is_short_and_uses_what_exists() -> None:
    """It is the first code that a newcomer copies (tests/e2e runs it against a real server)."""
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) <= 22
    used = {
        node.func.attr
        for node in ast.walk(ast.parse(example))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and getattr(node.func.value, "id", "") == "chairlift"
    }
    assert {"generate", "complete", "wait_ready"} <= used <= set(dir(Chairlift))


def test_every_command_it_names_exists() -> None:
    """Renaming a subcommand or a make target must not leave README behind."""
    commands = set(re.findall(r"chairlift (serve|\w+)\b(?=[^`\n]*[`\n])", sh_blocks()))
    help_text = cli.build_parser().format_help()
    for command in commands:
        assert re.search(rf"^\s+{command}\b", help_text, re.MULTILINE), command
    targets = re.findall(r"^make ([\w-]+)", sh_blocks(), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_relative_links_lead_somewhere() -> None:
    """A picture that does not load is what a visitor sees first."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def sh_blocks() -> str:
    return "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
