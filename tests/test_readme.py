"""README and docs/ say what is true: the configuration table, the example, commands and links."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from client import Chairlift, cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_configuration_table_is_complete() -> None:
    """A key that is missing there is one that nobody finds; a wrong default is worse."""
    from scheduler_svc.settings.config import Config

    table = (ROOT / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", table, re.MULTILINE)
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


def test_every_command_they_name_exists() -> None:
    """Renaming a subcommand, a make target or a module must not leave the pages behind."""
    commands = set(re.findall(r"chairlift (serve|\w+)\b(?=[^`\n]*[`\n])", sh_blocks()))
    help_text = cli.build_parser().format_help()
    for command in commands:
        assert re.search(rf"^\s+{command}\b", help_text, re.MULTILINE), command
    targets = re.findall(r"^make ([\w-]+)", sh_blocks(), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for module in re.findall(r"\btests(?:\.\w+)+", "".join(page.read_text() for page in PAGES)):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    """A picture that does not load is what a visitor sees first."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


def sh_blocks() -> str:
    pages = "".join(page.read_text() for page in PAGES)
    return "\n".join(re.findall(r"```sh\n(.*?)```", pages, re.DOTALL))
