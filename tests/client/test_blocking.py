"""The blocking client against a real gRPC server."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path

import grpc
import pytest

import client
from client import Chairlift, ChatMessage
from tests.support.fake_server import FakeEngine


def test_the_exports_are_curated_and_real() -> None:
    """`from client import X` is the API: nothing may slip in or out unnoticed."""
    public = {name for name, value in vars(client).items() if not name.startswith("_")}
    modules = {path.stem for path in Path(client.__file__).parent.iterdir()}
    assert public - modules == set(client.__all__)
    assert sorted(client.__all__, key=str.lower) == client.__all__


def test_deltas_stream_and_the_rest_stays_readable(chairlift: Chairlift) -> None:
    """The first thing that everyone does with the client."""
    stream = chairlift.generate("count 3")
    assert [(delta.text, delta.token_ids, delta.index) for delta in stream] == [
        ("w0 ", (0,), 0),
        ("w1 ", (1,), 0),
        ("w2 ", (2,), 0),
    ]
    assert stream.started is not None
    assert (stream.started.seed, stream.started.model) == (7, "fake-model")
    assert stream.finish_reason == "stop"
    assert stream.usage is not None
    assert stream.usage.completion_tokens == 3
    assert stream.completions[0].stop_token_id == 2
    assert stream.completions[0].stop_string is None
    assert stream.text() == "w0 w1 w2 "


def test_a_request_runs_before_it_is_read(chairlift: Chairlift, engine: FakeEngine) -> None:
    """Several streams opened in a row must run side by side, not one after another."""
    streams = [chairlift.generate("count 2", request_id=f"r{number}") for number in range(4)]
    assert [stream.text() for stream in streams] == ["w0 w1 "] * 4
    assert sorted(request.request_id for request in engine.requests) == ["r0", "r1", "r2", "r3"]


def test_a_stream_outlives_the_name_of_its_client(address: str) -> None:
    """`for delta in Chairlift(address).generate(…)` keeps no other reference to the client."""
    assert "".join(delta.text for delta in Chairlift(address).generate("count 2")) == "w0 w1 "


def test_siblings_are_told_apart(chairlift: Chairlift) -> None:
    """With n > 1 the deltas interleave; each text must be its own."""
    stream = chairlift.generate("count 2", n=3)
    assert [delta.index for delta in stream] == [0, 1, 2, 0, 1, 2]
    answers = stream.answers()
    assert [answer.completion.index for answer in answers] == [0, 1, 2]
    texts = ["w0 w1 ", "(1)w0 (1)w1 ", "(2)w0 (2)w1 "]
    assert [answer.text for answer in answers] == texts
    assert [stream.text(index) for index in range(3)] == texts


def test_complete_keeps_all_siblings(chairlift: Chairlift) -> None:
    """Three answers that were paid for, and two of them thrown away."""
    answer = chairlift.complete("count 1", n=3)
    assert answer.text == "w0 "
    assert [sibling.text for sibling in answer.siblings] == ["(1)w0 ", "(2)w0 "]
    assert [sibling.completion.index for sibling in answer.siblings] == [1, 2]
    assert chairlift.complete("count 1").siblings == ()


def test_complete_asks_for_one_piece(chairlift: Chairlift, engine: FakeEngine) -> None:
    """Without `stream: false` a batch job would pay for deltas that nobody looks at."""
    answer = chairlift.complete("count 3", max_tokens=5)
    assert answer.text == "w0 w1 w2 "
    assert answer.token_ids == (0, 1, 2)
    assert answer.finish_reason == "stop"
    assert engine.requests[0].HasField("stream")
    assert not engine.requests[0].stream


@pytest.mark.parametrize("how", ["cancel", "with", "break", "close"])
def test_leaving_early_cancels_the_request(address: str, engine: FakeEngine, how: str) -> None:
    """A request nobody reads would hold its blocks until it had run to its end."""
    chairlift = Chairlift(address)
    if how == "break":
        for _ in chairlift.generate("forever", request_id="left"):
            break
    elif how == "with":
        with chairlift.generate("forever", request_id="left") as stream:
            next(stream)
    else:
        stream = chairlift.generate("forever", request_id="left")
        next(stream)
        stream.cancel() if how == "cancel" else chairlift.close()
    assert engine.gone.get(timeout=10) == "left"
    chairlift.close()


def test_cancel_from_another_thread_ends_the_loop(chairlift: Chairlift) -> None:
    """A stop button lives in another thread than the loop that it stops; no error then."""
    stream = chairlift.generate("silent")
    timer = threading.Timer(0.2, stream.cancel)
    timer.start()
    assert list(stream) == []
    assert stream.finish_reason is None
    timer.join()


def test_the_deadline_reaches_the_server(chairlift: Chairlift, engine: FakeEngine) -> None:
    """A deadline kept only here would leave the server working for nobody."""
    with pytest.raises(client.DeadlineExceeded, match="the timeout passed before the answer"):
        chairlift.generate("silent", timeout=0.3).text()
    assert engine.gone.get(timeout=10)
    assert engine.timeouts[0] is not None
    assert engine.timeouts[0] < 10, "some other deadline"


def test_the_clients_own_timeout_is_the_default(address: str) -> None:
    """One setting for a whole program, which a single call may override."""
    with Chairlift(address, timeout=0.2) as chairlift:
        with pytest.raises(client.DeadlineExceeded):
            chairlift.generate("silent").text()
        assert chairlift.generate("count 1", timeout=20).text() == "w0 "


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("INVALID_ARGUMENT", client.InvalidRequest),
        ("ALREADY_EXISTS", client.DuplicateRequest),
        ("NOT_FOUND", client.NotFound),
        ("RESOURCE_EXHAUSTED", client.QueueFull),
        ("FAILED_PRECONDITION", client.Paused),
        ("UNAVAILABLE", client.Unavailable),
        ("CANCELLED", client.Cancelled),
        ("UNIMPLEMENTED", client.NotImplementedYet),
        ("UNAUTHENTICATED", client.Unauthenticated),
        ("INTERNAL", client.ServerError),
    ],
)
@pytest.mark.parametrize("when", ["fail", "broken"])
def test_each_status_is_an_exception_with_the_servers_sentence(
    chairlift: Chairlift, status: str, kind: type[client.ChairliftError], when: str
) -> None:
    """Callers catch by type and show the sentence; grpc's own errors hide both."""
    prompt = f"{when} {status} temperature is -1; allowed: >= 0"
    with pytest.raises(
        client.ChairliftError, match=r"^temperature is -1; allowed: >= 0$"
    ) as caught:
        chairlift.generate(prompt, retries=0).text()
    assert type(caught.value) is kind
    assert caught.value.status is grpc.StatusCode[status]


def test_a_full_queue_says_when_to_come_back(chairlift: Chairlift) -> None:
    """The server knows its load; a client that guesses comes back too early, with all others."""
    with pytest.raises(client.QueueFull) as caught:
        chairlift.generate("fail RESOURCE_EXHAUSTED 9 requests are waiting", retries=0).text()
    assert caught.value.retry_seconds == 2.5


def test_nobody_there_is_said_plainly(nobody: str) -> None:
    """The most common error of all: it must name the address and the way out."""
    with Chairlift(nobody, retries=0) as chairlift:
        with pytest.raises(client.Unreachable, match=rf"server answers at {nobody}: .*serve"):
            chairlift.generate("count 1").text()
        with pytest.raises(client.Unavailable):
            chairlift.tokenize("x")
        assert not chairlift.is_ready()


def test_chat_and_tokens_travel_as_such(chairlift: Chairlift) -> None:
    """The three kinds of prompt must not be confused on the way."""
    chat = [{"role": "system", "content": "Be brief."}, ChatMessage("user", "Hello")]
    assert chairlift.generate(chat).text() == "you said: Hello"
    assert chairlift.generate([5, 6]).text() == "<5><6>"


def test_small_calls(chairlift: Chairlift) -> None:
    """Each unary call unwraps its answer into what its name promises."""
    assert chairlift.tokenize("ab") == [97, 98]
    assert chairlift.tokenize([ChatMessage("user", "a")]) == [97]
    assert chairlift.detokenize([97, 98]) == "ab"
    assert chairlift.abort("a", "b") == ["a"]
    assert chairlift.model_info().model == "fake-model"
    assert chairlift.server_info().version == "0.1.0"
    assert chairlift.list_requests(state="DECODING", limit=5).total == 2
    assert chairlift.get_request("first").row == 3
    assert chairlift.get_cache().chunks_free == 75
    assert chairlift.flush_cache() == 40
    assert [summary.step_id for summary in chairlift.watch_steps()] == [0, 1]
    with pytest.raises(client.NotFound, match="'other'"):
        chairlift.get_request("other")


def test_wait_ready_says_what_it_waits_for(chairlift: Chairlift, engine: FakeEngine) -> None:
    """A model can take minutes to load: waiting must end at once then, and say why until then."""
    seen: list[str] = []

    def note(waiting_for: str) -> None:
        seen.append(waiting_for)
        engine.is_ready = True

    engine.is_ready = False
    chairlift.wait_ready(timeout=20, on_change=note)
    assert seen == ["worker: loading"]


def test_wait_ready_gives_up(chairlift: Chairlift, engine: FakeEngine, nobody: str) -> None:
    """Scripts need an end, and the reason."""
    engine.is_ready = False
    with pytest.raises(client.DeadlineExceeded, match=r"not ready after 0.3 s \(worker: loading\)"):
        chairlift.wait_ready(timeout=0.3)
    engine.error = "generation_config.json: top_k is True"
    with pytest.raises(client.DeadlineExceeded, match=r"\(generation_config.json: top_k is True\)"):
        chairlift.wait_ready(timeout=0.3)
    with (
        Chairlift(nobody) as other,
        pytest.raises(client.DeadlineExceeded, match=r"\(unreachable\)"),
    ):
        other.wait_ready(timeout=0.3)


def test_a_large_answer_arrives(chairlift: Chairlift) -> None:
    """grpc refuses messages over 4 MiB unless told otherwise; prompt_logprobs are larger."""
    assert len(chairlift.detokenize([120] * (5 << 20))) == 5 << 20


def test_ctrl_c_leaves_the_connection_usable(chairlift: Chairlift) -> None:
    """Ctrl-C interrupts the main thread wherever it waits; within gRPC it may keep a lock, and the
    notebook cell after the one that was interrupted would hang."""
    stream = chairlift.generate("silent")
    files: list[str] = []

    def look() -> None:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        files.extend(entry.filename for entry in traceback.extract_stack(frame))
        stream.cancel()

    timer = threading.Timer(0.3, look)
    timer.start()
    assert list(stream) == []
    timer.join()
    assert any(name.endswith("blocking_stream.py") for name in files)
    assert [name for name in files if "/grpc/" in name] == []
