"""An engine without scheduler or worker: the test says what it does, and sees what it was told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from scheduler_svc.core.request import FinishReason
from scheduler_svc.engine.events import (
    Delta,
    Event,
    Failed,
    Finished,
    ModelFacts,
    Status,
    Submission,
)
from scheduler_svc.engine.step_feed import StepFeed
from scheduler_svc.errors import ChairliftError

FACTS = ModelFacts(
    model_path="/models/tiny",
    model_type="llama",
    architecture="LlamaForCausalLM",
    vocab_size=300,
    num_embeddings=300,
    max_model_len=128,
    pool_tokens=1000,
    dtype="float32",
    device="cpu",
)


@dataclass(slots=True)
class Live:
    """A request whose siblings, by index, have said so many tokens; ended ones are not there."""

    submission: Submission
    num_output: dict[int, int]
    unsent_text: str = ""  # of a resumed answer
    unsent: dict[int, Delta] = field(default_factory=dict)  # of an answer wanted in one piece


@dataclass(eq=False)
class FakeEngine:
    """Ends requests as the real one does: by stop token, stop string, max_tokens or abort."""

    deliver: Callable[[list[Event]], None] = lambda events: None
    on_status: Callable[[Status], None] = lambda status: None
    status: Status = field(default_factory=Status)
    steps: StepFeed = field(default_factory=StepFeed)
    live: dict[str, Live] = field(default_factory=dict)
    submitted: list[Submission] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)  # to questions, by name
    cached_blocks: int = 0  # what a flush finds
    cached_tokens: int = 0  # of every request's prompt
    is_running: bool = False
    crash: Callable[[BaseException], None] | None = None
    script: Callable[[FakeEngine, Submission], None] | None = None  # on every submission

    def attach(
        self, deliver: Callable[[list[Event]], None], on_status: Callable[[Status], None]
    ) -> None:
        self.deliver, self.on_status = deliver, on_status

    def start(self, on_crash: Callable[[BaseException], None] | None = None) -> None:
        self.is_running = True
        self.crash = on_crash

    def stop(self) -> None:
        self.is_running = False

    def submit(self, submission: Submission) -> None:
        self.submitted.append(submission)
        new = submission.new
        siblings = {new.index + place: len(new.output_token_ids) for place in range(new.n)}
        self.live[new.request_id] = Live(submission, siblings, submission.unsent_text)
        if self.script is not None:
            self.script(self, submission)

    def abort(self, request_ids: Sequence[str]) -> Future[list[str]]:
        ended = [request_id for request_id in request_ids if request_id in self.live]
        self.aborted += ended
        for request_id in ended:
            self.end(request_id, FinishReason.ABORT)
        future: Future[list[str]] = Future()
        future.set_result(ended)
        return future

    def ask(self, question: Callable[[Any], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(question(self))
        return future

    def flush_cache(self) -> Future[int]:
        future: Future[int] = Future()
        future.set_result(self.cached_blocks)
        self.cached_blocks = 0
        return future

    # What a test makes it do

    def become(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)
        self.on_status(self.status)

    def become_ready(self, facts: ModelFacts = FACTS) -> None:
        self.become(worker="ready", model=facts)

    def speak(self, request_id: str, token_ids: Sequence[int], index: int = 0) -> None:
        """One step per token; stops by itself where the request says so."""
        for token_id in token_ids:
            if request_id not in self.live or index not in self.live[request_id].num_output:
                return
            self.deliver(self._step(request_id, index, token_id))

    def end(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.LENGTH,
        index: int | None = None,
    ) -> None:
        """Ends one sibling, or all that live."""
        which = list(self.live[request_id].num_output) if index is None else [index]
        self.deliver([e for index in which for e in self._finish(request_id, index, reason)])

    def fail(self, request_id: str, error: ChairliftError) -> None:
        del self.live[request_id]
        self.deliver([Failed(request_id, error)])

    def _step(self, request_id: str, index: int, token_id: int) -> list[Event]:
        live = self.live[request_id]
        new, text = live.submission.new, live.submission.texts[index - live.submission.new.index]
        live.num_output[index] += 1
        is_stop_token = token_id in new.sampling.stop_token_ids
        is_silent = is_stop_token and not text.include_stop_str_in_output
        shown, live.unsent_text = live.unsent_text, ""
        shown += "" if is_silent else text.push(token_id)
        reason, stop = None, text.matched_stop
        if stop is not None or is_stop_token:
            reason = FinishReason.STOP
        elif live.num_output[index] == new.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            shown += text.finish()
        events: list[Event] = [Delta(request_id, index, [token_id], shown)]
        if not live.submission.is_streamed:
            delta = live.unsent.setdefault(index, Delta(request_id, index, [], ""))
            delta.token_ids.append(token_id)
            delta.text += shown
            events = []
        if reason is not None:
            stop_token_id = token_id if stop is None and is_stop_token else None
            events += self._finish(request_id, index, reason, stop_token_id, stop)
        return events

    def _finish(
        self,
        request_id: str,
        index: int,
        reason: FinishReason,
        stop_token_id: int | None = None,
        stop_string: str | None = None,
    ) -> list[Event]:
        """The end, behind what was not sent before it."""
        live = self.live[request_id]
        num_output = live.num_output.pop(index)
        if not live.num_output:
            del self.live[request_id]
        end = Finished(
            request_id,
            index,
            reason,
            stop_token_id,
            stop_string,
            prompt_tokens=len(live.submission.new.prompt_token_ids),
            completion_tokens=num_output,
            cached_tokens=self.cached_tokens,
            queued_seconds=0.25,
            prefill_seconds=0.5,
            decode_seconds=1.0,
            preemptions=0,
        )
        return [live.unsent[index], end] if index in live.unsent else [end]


def _listed(engine: FakeEngine, wanted: str) -> list[Any]:
    return [one for one in engine.answers["list_requests"] if not wanted or one.state == wanted]


def fake_views() -> SimpleNamespace:
    """In the place of scheduler_svc/core/views.py: the answers that the test put in the engine."""
    return SimpleNamespace(
        list_requests=lambda engine, wanted, limit: _listed(engine, wanted)[:limit],
        count_requests=lambda engine, wanted: len(_listed(engine, wanted)),
        get_request=lambda engine, request_id: engine.answers["get_request"].get(request_id),
        get_cache=lambda engine: engine.answers["get_cache"],
    )
