"""A conversation: its system message and its turns, each a question and the model's answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from client.chat_messages import ChatMessage


@dataclass(slots=True)
class Conversation:
    """What the model is sent; whole turns only, so that roles always alternate."""

    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)  # (question, answer)

    def messages(self, question: str | None = None) -> list[ChatMessage]:
        """All messages so far, and a further question."""
        messages = [] if self.system is None else [ChatMessage("system", self.system)]
        for asked, answer in self.turns:
            messages += [ChatMessage("user", asked), ChatMessage("assistant", answer)]
        if question is not None:
            messages.append(ChatMessage("user", question))
        return messages

    def undo(self) -> str | None:
        """Removes the last turn; its question, or None if there is no turn."""
        return self.turns.pop()[0] if self.turns else None

    def as_json(self) -> str:
        """The messages, as OpenAI's API has them."""
        messages = [{"role": each.role, "content": each.content} for each in self.messages()]
        return json.dumps(messages, indent=2, ensure_ascii=False) + "\n"

    def as_markdown(self) -> str:
        """To be read."""
        return "\n".join(f"## {each.role}\n\n{each.content}\n" for each in self.messages())
