"""Direct calls between an ingress and a replica: frames, proofs, cancelling, holding back."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import pytest

from cfg_core.errors import EngineDeadError
from deployments.direct import connections as connections_module
from deployments.direct import listener as listener_module
from deployments.direct import protocol
from deployments.direct.address import Address, address_in
from deployments.direct.connections import Connections, DirectItems, NotTakenError
from deployments.direct.listener import CallListener
from deployments.direct.protocol import MAX_FRAME_BYTES, FrameError, FrameReader, frame
from deployments.health import replica_health
from deployments.health.replica_health import COUNTS_FOR_S, Failure, ReplicaHealth
from deployments.http.text_answers import DONE, is_last
from deployments.messages import Chunk, Failed, GenerateCall, Heartbeat, Whole
from deployments.replica_client.direct_calls import DirectCalls
from deployments.requests.group import GroupRequest
from deployments.requests.prefix_hashes import Prefix
from deployments.requests.progress import Part, Progress, pack
from deployments.requests.usage import OutputCounts, Usage
from deployments.routing.call_placer import CallPlacer

pytestmark = pytest.mark.timeout(20)


@pytest.fixture(autouse=True)
def _all_are_well(monkeypatch):
    monkeypatch.setattr(replica_health, "_health", ReplicaHealth())


def nothing() -> None: ...


class Replica:
    """A listener whose calls are scripts: texts become chunks, numbers are pauses in seconds."""

    def __init__(self, max_calls: int = 8) -> None:
        self.listener = CallListener("127.0.0.1", self._serve, max_calls)
        self.pool = Connections()
        self.taken: list[object] = []
        self.ended: list[object] = []
        self.aborted: list[object] = []
        self.num_sent = 0

    async def __aenter__(self) -> Replica:
        await self.listener.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.pool.close()
        self.listener.close()
        await asyncio.sleep(0)

    async def _serve(self, script) -> AsyncGenerator[object]:
        try:
            for item in script:
                if isinstance(item, float):
                    await asyncio.sleep(item)
                elif isinstance(item, Exception):
                    raise item
                else:
                    self.num_sent += 1
                    yield Chunk(item) if isinstance(item, str) else item
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(script)
            raise

    async def call(self, *script: object) -> DirectItems:
        return await self.pool.begin(
            "replica",
            self.listener.address,
            script,
            lambda: self.taken.append(script),
            lambda: self.ended.append(script),
        )

    async def all_of(self, *script: object) -> list[object]:
        items, answer = [], await self.call(*script)
        with suppress(StopAsyncIteration):
            while True:
                items.append(await answer.next())
        return items

    def num_open(self) -> int:
        return len(self.listener._connections)


@pytest.fixture
async def replica() -> AsyncGenerator[Replica]:
    async with Replica() as made:
        yield made


# --- frames ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 1000])
def test_frames_are_read_however_the_stream_is_cut(step):
    payloads = [b"", b"a", b"x" * 300, b"", b"last"]
    stream, reader, read = b"".join(map(frame, payloads)), FrameReader(300), []
    for start in range(0, len(stream), step):
        read += reader.feed(stream[start : start + step])
    assert read == payloads


def test_a_frame_that_is_too_long_is_refused_before_it_arrives():
    with pytest.raises(FrameError, match="301 bytes"):
        FrameReader(300).feed(frame(b"x" * 301)[:4])
    with pytest.raises(FrameError):
        frame(bytes(MAX_FRAME_BYTES + 1))


# --- calls ----------------------------------------------------------------------------------------


async def test_items_come_in_order_and_the_connection_is_used_again(replica):
    usage = Usage(prompt_tokens=3)
    for _ in range(3):
        items = await replica.all_of(Heartbeat(usage), 0.02, "a", 0.02, Whole("b", usage))
        assert items == [Heartbeat(usage), Chunk("a"), Whole("b", usage)]
    assert await replica.all_of() == []
    assert replica.num_open() == 1
    assert len(replica.ended) == 4
    assert not replica.listener._calls


async def test_calls_at_the_same_time_do_not_mix():
    async with Replica(max_calls=50) as replica:
        answers = await asyncio.gather(
            *(replica.all_of(f"{n}.", 0.01, f"{n}!", 0.01, f"{n}?") for n in range(50))
        )
        for n, items in enumerate(answers):
            assert "".join(item.text for item in items) == f"{n}.{n}!{n}?"


async def test_chunks_that_have_arrived_come_joined_with_the_last_usage(replica):
    used = Usage(output_tokens=2)
    answer = await replica.call("a", Chunk("b", used), "c", Heartbeat(used), "d")
    await asyncio.sleep(0.1)
    assert await answer.next() == Chunk("abc", used)
    assert await answer.next() == Heartbeat(used)
    assert await answer.next() == Chunk("d")
    with pytest.raises(StopAsyncIteration):
        await answer.next()


async def test_joined_chunks_tell_of_all_outputs_behind_them(replica):
    """Else another replica would go on with a stream without some of its tokens."""
    first, second = (OutputCounts(n, 0, 0, n, (0, 0, 0, 0.0)) for n in (1, 3))
    outputs = [((Part(0, pack([token])),),) for token in range(3)]
    told = [Progress(outputs[0], first), Progress((), first), Progress(outputs[1], second)]
    chunks = [Chunk(text, progress=one) for text, one in zip("abc", told, strict=True)]
    answer = await replica.call(*chunks, Heartbeat(Usage()), *chunks, Chunk("d"))
    await asyncio.sleep(0.1)
    assert await answer.next() == Chunk("abc", None, Progress(outputs[0] + outputs[1], second))
    await answer.next()
    assert await answer.next() == Chunk("abcd"), "what the last one had is not told"


async def test_joined_chunks_are_of_limited_length(replica):
    text = "x" * 50_000
    answer = await replica.call(text, text, text)
    await asyncio.sleep(0.1)
    assert len((await answer.next()).text) == 2 * len(text)


def test_the_last_event_is_known_wherever_it_stands():
    stop = "event: message_stop\ndata: {}\n\n"
    assert is_last(DONE)
    assert is_last("data: 1\n\n" + DONE)
    assert is_last(stop)
    assert is_last("event: message_delta\ndata: {}\n\n" + stop)
    assert not is_last("data: 1\n\n")
    assert not is_last("event: message_delta\ndata: {}\n\n")
    assert not is_last("")


async def test_a_call_is_aborted_when_its_caller_cancels_and_only_that(replica):
    other = asyncio.ensure_future(replica.all_of("1", 0.3, "2"))
    answer = await replica.call("a", 10.0, "b")
    assert await answer.next() == Chunk("a")
    answer.cancel()
    answer.cancel()
    with pytest.raises(EngineDeadError):
        await answer.next()
    await asyncio.sleep(0.05)
    assert replica.aborted == [("a", 10.0, "b")]
    assert replica.ended == [("a", 10.0, "b")]
    assert await other == [Chunk("1"), Chunk("2")]


async def test_cancelling_after_the_end_keeps_the_connection(replica):
    answer = await replica.call("a")
    await answer.next()
    await asyncio.sleep(0.05)
    answer.cancel()
    assert await replica.all_of("b") == [Chunk("b")]
    assert replica.num_open() == 1


async def test_an_answer_whose_end_nobody_reads_frees_its_connection(replica):
    answer = await replica.call("data: a\n\n", DONE)
    assert is_last((await answer.next()).text) or is_last((await answer.next()).text)
    await asyncio.sleep(0.05)
    assert replica.ended
    await replica.all_of("b")
    assert replica.num_open() == 1


async def test_an_answer_that_is_not_read_is_held_back_and_holds_up_nobody(replica):
    texts = ["x" * 10_000] * 3_000
    answer = await replica.call(*texts)
    await asyncio.sleep(0.3)
    sent = replica.num_sent
    assert sent < len(texts) / 2
    assert await replica.all_of("b") == [Chunk("b")]
    await asyncio.sleep(0.2)
    assert replica.num_sent == sent + 1, "nothing goes on while nothing is read"
    chars = 0
    with suppress(StopAsyncIteration):
        while True:
            chars += len((await answer.next()).text)
    assert chars == 10_000 * len(texts)


async def test_a_lost_replica_ends_its_calls_and_what_had_arrived_is_read_first(replica):
    answer = await replica.call("a", 10.0)
    await asyncio.sleep(0.05)
    replica.listener.close()
    await asyncio.sleep(0.05)
    assert await answer.next() == Chunk("a")
    with pytest.raises(EngineDeadError):
        await answer.next()
    assert len(replica.ended) == 1
    assert replica.aborted
    with pytest.raises(OSError):  # noqa: PT011 - any kind
        await replica.call("b")
    assert len(replica.ended) == 1, "a call that never began has no end"


async def test_an_error_that_nobody_expected_is_told_and_logged(replica, caplog):
    first, failed = await replica.all_of("a", 0.02, RuntimeError("secret details"))
    assert first == Chunk("a")
    assert isinstance(failed, Failed)
    assert "secret" not in str(failed.error)
    assert await replica.all_of("b") == [Chunk("b")]
    assert replica.num_open() == 1
    assert "secret details" in caplog.text


async def test_one_call_too_many_is_refused_and_its_connection_stays():
    async with Replica(max_calls=2) as replica:
        running = [asyncio.ensure_future(replica.all_of(0.2, "a")) for _ in range(2)]
        await asyncio.sleep(0.05)
        refused = await replica.call("b")
        with pytest.raises(NotTakenError):
            await refused.next()
        assert [await task for task in running] == [[Chunk("a")]] * 2
        assert await replica.all_of("c") == [Chunk("c")]
        assert replica.num_open() == 3
        assert not replica.aborted
        assert ("b",) not in replica.taken, "a refused call is no load of the replica"
        assert ("b",) in replica.ended


@pytest.mark.parametrize(("max_calls", "num_taken"), [(1, 1), (0, 0)])
async def test_a_call_is_counted_when_a_replica_has_taken_it(max_calls, num_taken):
    async def serve(call) -> AsyncGenerator[object]:
        yield Chunk("a")

    listener = CallListener("127.0.0.1", serve, max_calls)
    await listener.start()
    placer = CallPlacer()
    placer.update("generator", {"r": listener.address.report()})
    group = GroupRequest(prefixes=(Prefix(num_tokens=1, chain=()),))
    call = GenerateCall(endpoint="completion", body={}, guidance=None, group=group, headers={})
    calls = DirectCalls("generator")
    items = await calls.begin(call)
    assert items is not None
    with suppress(NotTakenError):
        assert await items.next() == Chunk("a")
    assert calls.num_taken == num_taken
    items.cancel()
    listener.close()
    await asyncio.sleep(0)


async def test_an_idle_connection_that_was_closed_harms_no_call(replica):
    """A firewall, or the replica, may close connections that nothing uses."""
    await asyncio.gather(*(replica.all_of(0.05, "a") for _ in range(4)))
    (idle,) = replica.pool._idle.values()
    assert len(idle) == 4
    next(iter(replica.listener._connections)).close()
    await asyncio.sleep(0.05)
    assert len(idle) == 3
    idle[-1].close()  # `connection_lost` comes a turn later
    assert await replica.all_of("b") == [Chunk("b")]
    await asyncio.sleep(0.05)
    assert replica.num_open() == 2


async def test_a_call_whose_connection_is_lost_before_an_item_may_be_sent_again(replica):
    answer = await replica.call(10.0, "a")
    await asyncio.sleep(0.05)
    replica.listener.close()
    with pytest.raises(NotTakenError):
        await answer.next()
    assert not replica.taken
    assert len(replica.ended) == 1


async def test_a_call_that_is_too_large_takes_no_connection(replica, monkeypatch):
    await replica.all_of("a")
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "MAX_FRAME_BYTES", 1000)
        with pytest.raises(FrameError):
            await replica.call("x" * 1000)
    assert await replica.all_of("b") == [Chunk("b")]
    assert replica.num_open() == 1


async def test_a_connection_that_is_dropped_silently_is_noticed(replica):
    """Linux asks after an idle connection, and limits how long a call stays unacknowledged."""

    def options(transport: asyncio.Transport) -> tuple[int, ...]:
        connected = transport.get_extra_info("socket")
        return (
            connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
            connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
            connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
            connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
        )

    await replica.all_of("a")
    (idle,), served = replica.pool._idle.values(), replica.listener._connections
    assert options(idle[0]._transport) == (1, 10, 5, 3, 25_000)
    assert options(next(iter(served))._transport) == (1, 10, 5, 3, 0)


async def test_stopping_sends_all_of_the_answers_that_are_complete(replica):
    """Also what the caller has not read yet when the last item is made."""
    text = "x" * 300_000
    begun = Heartbeat(Usage())
    answers = [await replica.call(begun, Whole(text), Whole(text)) for _ in range(8)]
    for answer in answers:
        await answer.next()
    await replica.listener.stop()
    for answer in answers:
        assert await answer.next() == Whole(text)
        assert await answer.next() == Whole(text)
        with pytest.raises(StopAsyncIteration):
            await answer.next()


async def test_stopping_waits_for_a_reader_who_is_slow(replica):
    text = "x" * 20_000_000
    answer = await replica.call(Heartbeat(Usage()), Whole(text), Whole(text))
    await answer.next()
    stopped = asyncio.ensure_future(replica.listener.stop())
    await asyncio.sleep(0.2)
    assert not stopped.done(), "the answer is not sent yet"
    assert [await answer.next() for _ in range(2)] == [Whole(text)] * 2
    await stopped


async def test_stopping_refuses_new_calls_and_waits_for_the_others(replica):
    await replica.all_of("idle")
    answer = asyncio.ensure_future(replica.all_of("a", 0.2, "b"))
    await asyncio.sleep(0.05)
    stopped = asyncio.ensure_future(replica.listener.stop())
    await asyncio.sleep(0.05)
    assert not stopped.done()
    with pytest.raises(NotTakenError):
        await (await replica.call("c")).next()
    await stopped
    assert await answer == [Chunk("a"), Chunk("b")]


# --- strangers ------------------------------------------------------------------------------------


class Bomb:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


async def test_nothing_of_a_caller_without_the_secret_is_unpickled(replica, tmp_path):
    bomb = tmp_path / "went-off"
    address = replica.listener.address
    impostor = Address(address.host, address.port, bytes(32))
    with pytest.raises(ConnectionError):
        await replica.pool.begin("other", impostor, Bomb(bomb), nothing, nothing)
    payload = frame(pickle.dumps(Bomb(bomb)))
    for sent in (payload, frame(b"x" * 64) + payload, frame(b"") + payload, b"GET / HTTP"):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(sent)
        with suppress(ConnectionError):
            assert len(await reader.read()) == 36, "the challenge, and then the end"
        writer.close()
    assert replica.num_open() == 0
    assert await replica.all_of("a") == [Chunk("a")]
    assert not bomb.exists()


async def test_nothing_of_a_listener_without_the_secret_is_unpickled(tmp_path):
    """Another process may get the port of a replica that has died."""
    bomb = tmp_path / "went-off"

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(bytes(32)))
        challenge_and_proof = (await reader.readexactly(4 + 64))[4:]
        writer.write(frame(challenge_and_proof[32:]))  # the caller's own proof, sent back
        writer.write(frame(pickle.dumps(Bomb(bomb))))
        writer.close()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ConnectionError):
        await Connections().begin(
            "replica", Address("127.0.0.1", port, bytes(32)), "call", nothing, nothing
        )
    server.close()
    assert not bomb.exists()


async def test_a_proof_cannot_be_used_again(replica, monkeypatch):
    """Each connection has another challenge."""
    heard: list[bytes] = []
    write = connections_module._Connection._write

    def recorded(connection, data: bytes) -> None:
        heard.append(data)
        write(connection, data)

    monkeypatch.setattr(connections_module._Connection, "_write", recorded)
    await replica.all_of("a")
    address = replica.listener.address
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(heard[0])
    with suppress(ConnectionError):
        assert len(await reader.read()) == 36
    writer.close()


async def test_unproven_connections_are_few_and_short_of_time(replica, monkeypatch):
    monkeypatch.setattr(listener_module, "PROOF_LIMIT_S", 0.2)
    monkeypatch.setattr(listener_module, "MAX_UNPROVEN", 3)
    address = replica.listener.address
    await replica.all_of("a")  # a connection that has its proof
    strangers = [await asyncio.open_connection(address.host, address.port) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert replica.num_open() == 4
    closed = [reader.at_eof() or bool(reader.exception()) for reader, _ in strangers]
    assert closed[-1] is False, "the newest may be an ingress"
    both = await asyncio.gather(replica.all_of(0.05, "c"), replica.all_of(0.05, "d"))
    assert both == [[Chunk("c")], [Chunk("d")]], "an ingress still connects"
    await asyncio.sleep(0.3)
    assert replica.num_open() == 2
    assert await replica.all_of("b") == [Chunk("b")]
    for _, writer in strangers:
        writer.close()


async def test_a_replica_that_cannot_be_reached_is_not_tried_for_a_while(replica, monkeypatch):
    monkeypatch.setitem(COUNTS_FOR_S, Failure.UNREACHABLE, 0.2)
    wrong = Address("127.0.0.1", replica.listener.address.port, bytes(32))
    with pytest.raises(ConnectionError, match=r"secret|closed|reset"):
        await replica.pool.begin("other", wrong, "call", nothing, nothing)
    with pytest.raises(ConnectionError, match="lately"):
        await replica.pool.begin("other", wrong, "call", nothing, nothing)
    assert "secret" not in repr(wrong), "no log shows the secret"
    await asyncio.sleep(0.25)
    with pytest.raises(ConnectionError, match=r"secret|closed|reset"):
        await replica.pool.begin("other", wrong, "call", nothing, nothing)


async def test_one_call_tries_to_connect_for_all(monkeypatch):
    """Where a firewall drops the port, the others do not wait."""
    monkeypatch.setattr(connections_module, "CONNECT_LIMIT_S", 0.3)
    monkeypatch.setitem(COUNTS_FOR_S, Failure.UNREACHABLE, 0.1)
    writers: list[asyncio.StreamWriter] = []
    mute = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    address = Address("127.0.0.1", mute.sockets[0].getsockname()[1], bytes(32))
    pool = Connections()

    async def took() -> float:
        start = asyncio.get_running_loop().time()
        with pytest.raises(OSError):  # noqa: PT011 - any kind
            await pool.begin("replica", address, "call", nothing, nothing)
        return asyncio.get_running_loop().time() - start

    await took()
    await asyncio.sleep(0.15)
    monkeypatch.setitem(COUNTS_FOR_S, Failure.UNREACHABLE, 10)
    assert sorted(t > 0.25 for t in await asyncio.gather(*(took() for _ in range(5)))) == [
        False,
        False,
        False,
        False,
        True,
    ]
    for writer in writers:
        writer.close()
    mute.close()


def test_the_address_travels_in_a_report():
    address = Address("10.0.0.1", 4711, bytes(range(32)))
    assert address_in({"running": 3, **address.report()}) == address
    assert address_in({"running": 3}) is None
