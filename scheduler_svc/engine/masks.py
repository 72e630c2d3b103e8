"""Grammar masks: which tokens the samples of a step may be, computed while the step runs.

A plan that awaits a mask is sent before the mask is known. Each of its constrained samples follows
tokens that may still be unknown, under run-ahead the one that the step before it samples. As soon
as a sample's tokens are known, a thread follows the grammar to it, and the last one sends the mask.
It is always sent, without the samples whose requests have ended meanwhile: the worker waits for it.

An answer whose grammar cannot be followed further fails by name, and so does one whose mask takes
longer than MASK_SECONDS; its thread is given up, and nobody waits for it.

Belongs to the engine's thread, but for what the threads for masks do.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from protos import link_pb2
from scheduler_svc.core.request import Request, RequestState
from scheduler_svc.core.state import InFlight, State
from scheduler_svc.grammar.matcher import GrammarFailed, Matcher

logger = logging.getLogger(__name__)

MASK_SECONDS: Final = 2.0  # one sample's; hostile grammars that pass the check take 0.02
NUM_THREADS: Final = max(1, min(4, (os.cpu_count() or 1) - 1))

Send = Callable[[link_pb2.Envelope], None]


@dataclass(slots=True, eq=False)
class _Samples:
    """The samples of one request in a step: one, and one behind each draft token."""

    request: Request
    matcher: Matcher
    position: int  # of the first one's token
    first: int  # index into the plan's samples
    drafts: tuple[int, ...]
    output: list[int] = field(default_factory=list)  # of the request, before the first sample
    began: float | None = None


@dataclass(slots=True, eq=False)
class _Step:
    """A step whose mask has not been sent."""

    in_flight: InFlight
    send: Send
    unknown: list[_Samples]  # behind tokens that have not come
    running: set[_Samples] = field(default_factory=set)
    words: dict[int, bytes] = field(default_factory=dict)  # by sample


class Masks:
    """`fail` ends an unfinished request with a reason; `post` has a function called in the engine's
    thread."""

    def __init__(
        self,
        state: State,
        fail: Callable[[Request, str], None],
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._fail = fail
        self._post = post
        self._clock = clock
        self._matchers: dict[str, Matcher] = {}  # of live requests, at the grammar's start
        self._followers: dict[Request, Matcher] = {}  # of those that have samples
        self._steps: list[_Step] = []
        self._ready: deque[tuple[_Step, _Samples]] = deque()
        self._lock = threading.Lock()  # guards the steps' fields
        self._threads: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        """Matchers held."""
        return len(self._matchers) + len(self._followers)

    def add(self, request_id: str, matcher: Matcher) -> None:
        """The request and its siblings have a grammar, each a copy of the matcher."""
        self._matchers[request_id] = matcher

    def begin(self, in_flight: InFlight, send: Send) -> None:
        """A plan that awaits a mask has been sent; `send` sends to its worker, from any thread."""
        samples = in_flight.constrained_samples()
        unknown = []
        for request, group in groupby(samples, lambda sample: sample.request):
            of_request = list(group)
            if request.state is not RequestState.FINISHED:
                first, last = of_request[0], of_request[-1]
                matcher = self._follower(request)
                unknown.append(
                    _Samples(request, matcher, first.position, first.sample, last.drafts)
                )
        self._steps.append(_Step(in_flight, send, unknown))
        self.advance()

    def advance(self) -> None:
        """Starts what can be computed by now, and forgets what has ended. Call it once per turn,
        and after a result."""
        self._forget_ended()
        if not self._steps:
            return
        now, in_flight = self._clock(), self._state.in_flight
        with self._lock:  # without steps whose worker was lost, or that it was told to discard
            self._steps = [s for s in self._steps if any(s.in_flight is f for f in in_flight)]
            steps = list(self._steps)
        for step in steps:
            with self._lock:
                self._note_known(step)
                late = [s for s in step.running if s.began and now - s.began > MASK_SECONDS]
                step.running.difference_update(late)
                is_complete = not step.unknown and not step.running
            for samples in late:
                self._give_up(samples)
            if is_complete:
                self._complete(step)
        if self._ready:
            self._start_work()

    def close(self) -> None:
        """Ends the threads, unless they are busy."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def _note_known(self, step: _Step) -> None:
        """Moves samples whose tokens have come to those that can be computed."""
        unknown, step.unknown = step.unknown, []
        for samples in unknown:
            request = samples.request
            if request.state is RequestState.FINISHED:
                continue
            if len(request.token_ids) < samples.position:
                step.unknown.append(samples)
                continue
            samples.output = request.token_ids[request.num_prompt_tokens : samples.position]
            step.running.add(samples)
            self._ready.append((step, samples))

    def _follower(self, request: Request) -> Matcher:
        matcher = self._followers.get(request)
        if matcher is None:
            matcher = self._followers[request] = self._matchers[request.request_id].copy()
        return matcher

    def _forget_ended(self) -> None:
        if self._matchers:
            live = self._state.requests
            for request_id in [name for name in self._matchers if name not in live]:
                del self._matchers[request_id]
        if self._followers:
            followed = self._followers
            for request in [r for r in followed if r.state is RequestState.FINISHED]:
                del followed[request]

    def _complete(self, step: _Step) -> None:
        """All that can be known of a step is: sends its mask, once."""
        with self._lock:
            if step not in self._steps:
                return
            self._steps.remove(step)
        mask = link_pb2.Mask(step_id=step.in_flight.step_id)
        for sample, words in sorted(step.words.items()):
            mask.sample_indices.append(sample)
            mask.words.append(words)
        step.send(link_pb2.Envelope(mask=mask))

    def _give_up(self, samples: _Samples) -> None:
        self.close()  # its thread is busy; others take over
        samples.matcher.give_up()
        self._fail_by(samples, f"a step of it takes longer than {MASK_SECONDS:g} s")

    def _fail_by(self, samples: _Samples, why: str) -> None:
        if samples.request.state is not RequestState.FINISHED:
            field = samples.matcher.grammar.constraint.field
            self._fail(samples.request, f"{field} cannot be followed further: {why}")

    def _start_work(self) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="mask")
        for _ in range(min(len(self._ready), NUM_THREADS)):
            self._threads.submit(self._work)

    # In the threads for masks

    def _work(self) -> None:
        """Computes what is ready, until nothing is."""
        while True:
            try:
                step, samples = self._ready.popleft()
            except IndexError:
                return
            samples.began = self._clock()
            masks = self._masks_of(samples)
            with self._lock:
                if samples not in step.running:
                    continue  # given up
                step.running.remove(samples)
                step.words.update(enumerate(masks, samples.first))
                is_complete = not step.unknown and not step.running
            if is_complete:
                self._complete(step)

    def _masks_of(self, samples: _Samples) -> list[bytes]:
        """None if the grammar cannot be followed; the request then fails, before its result."""
        try:
            return samples.matcher.masks(samples.output, samples.drafts)
        except GrammarFailed as error:
            why = str(error)
        except BaseException as error:  # also a panic in Rust; the step must not wait for ever
            logger.error("a grammar mask cannot be computed", exc_info=error)
            why = f"an internal error in Chairlift ({type(error).__name__}); see the log"
        self._post(lambda: self._fail_by(samples, why))
        return []
