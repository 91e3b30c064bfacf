"""Messages between processes over a pair of sockets: what is forged, odd or slow is refused, by name and in time."""

import contextlib
import json
import os
import random
import socket
import threading
import time

import pytest

from redco_cli.runtime.peers import handshake, messages, wire
from redco_cli.runtime.peers.handshake import MAGIC, HandshakeError, OtherSecretError, UnansweredError, introduce
from redco_cli.runtime.peers.messages import FIRST, LARGEST, TO_PROCESS, TO_SERVER, ProtocolError, decode, encode
from redco_cli.runtime.peers.wire import Wire
from tests.runtime.peers.ends import admit

SECRET = b"0123456789abcdef"
KEYS = (b"a" * 32, b"b" * 32)
HELLO = {
    "op": "hello",
    "process": 1,
    "processes": 2,
    "at": "here",
    "seconds": 3.5,
    "facts": "0" * 32,
    "devices": None,
    "stopped": None,
    "code": 0,
}


@pytest.fixture
def pair():
    """The server's end, and that of a process; and the raw sockets below."""
    sockets = socket.socketpair()
    ends = Wire(sockets[0], KEYS, is_server=True), Wire(sockets[1], KEYS, is_server=False)
    yield *ends, *sockets
    for end in ends:
        end.close()


def recorded(*sent, keys=KEYS):
    """The bytes of messages as a process sends them first."""
    near, far = socket.socketpair()
    end = Wire(near, keys, is_server=False)
    frames = []
    for message in sent:
        end.send(**message)
        frames.append(far.recv(2**20))
    end.close()
    far.close()
    return frames


def test_messages_arrive_in_order_both_ways(pair):
    server, process, *_ = pair
    for number in range(3):
        process.send(op="frozen", point=number)
        assert server.receive(5) == {"op": "frozen", "point": number}
        server.send(op="stop_at", point=number)
        assert process.receive(5) == {"op": "stop_at", "point": number}
    process.close()
    assert server.receive(5) is None
    assert not server.send(op="go")


def refused(pair, data):
    """What the server's end says of some bytes."""
    pair[3].setblocking(True)
    pair[3].sendall(data)

    def read():
        while pair[0].receive(5) is not None:
            pass

    with pytest.raises(ProtocolError) as error:
        read()
    return str(error.value)


FORGED = "forged, repeated, or not in its place"


def test_what_is_forged_repeated_moved_or_sent_back_is_refused():
    first, second = recorded({"op": "alive"}, {"op": "stop", "code": 75})
    other = recorded({"op": "alive"}, keys=(b"x" * 32, b"y" * 32))[0]
    changed = first.replace(b"alive", b"leave")
    for data in (first + first, second, second + first, other, changed, first[:-1] + bytes([first[-1] ^ 1])):
        near, far = socket.socketpair()
        server, process = Wire(near, KEYS, is_server=True), Wire(far, KEYS, is_server=False)
        assert refused((server, process, near, far), data) == FORGED
        server.close()
        process.close()


def test_a_message_that_is_sent_back_to_where_it_is_from_is_refused(pair):
    server, _, _, raw = pair
    server.send(op="alive")
    raw.setblocking(True)
    raw.sendall(raw.recv(4096))
    with pytest.raises(ProtocolError, match=FORGED):
        server.receive(5)


def test_a_message_that_is_cut_off_is_the_end(pair):
    server, process, _, raw = pair
    raw.sendall(recorded({"op": "alive"})[0][:-5])
    process.close()
    assert server.receive(5) is None


@pytest.mark.parametrize("length", [FIRST + 1, LARGEST, 2**32 - 1])
def test_what_is_large_before_all_have_met_is_refused_before_it_comes(pair, length):
    assert refused(pair, length.to_bytes(4)) == f"{length} bytes, where at most {FIRST} are taken"


def test_a_large_message_arrives_after_the_meeting(pair):
    server, process, *_ = pair
    server.largest = LARGEST
    value = ["é" * 1000] * 3000  # 18 MB of JSON
    sending = threading.Thread(target=process.send, kwargs={"op": "gather", "name": "x", "value": value})
    sending.start()
    assert server.receive(20)["value"] == value
    sending.join()


@pytest.mark.parametrize("place", [2, 30])
def test_a_message_has_one_deadline_however_it_drips(pair, place):
    server, _, _, raw = pair
    frame, over = recorded({"op": "alive"})[0], threading.Event()

    def drip():
        raw.setblocking(True)
        raw.sendall(frame[:place])
        for byte in frame[place:]:
            if over.wait(0.1):
                return
            raw.sendall(bytes([byte]))

    dripping = threading.Thread(target=drip)
    dripping.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        server.receive(0.5)
    assert 0.4 < time.monotonic() - began < 1.5
    over.set()
    dripping.join()


def test_nobody_who_reads_nothing_is_waited_for(pair, monkeypatch):
    monkeypatch.setattr(wire, "_SENDING", 0.5)
    began = time.monotonic()
    assert not pair[1].send(op="gather", name="x", value="x" * 10**7)
    assert time.monotonic() - began < 5


def test_a_receiver_comes_back_when_its_end_is_closed(pair):
    server = pair[0]
    closing = threading.Timer(0.2, server.close)
    closing.start()
    assert server.receive(20) is None
    closing.join()


@pytest.mark.parametrize("table", [TO_SERVER, TO_PROCESS])
def test_every_message_lacks_nothing_and_has_nothing_else(table):
    for op, fields in table.items():
        for message in ({"op": op, "more": 1}, *([{"op": op}] if fields else [])):
            with pytest.raises(ProtocolError, match=f"{op} with missing, unknown or impossible fields"):
                decode(encode(message), table)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[1]",
        b"3",
        b'"hello"',
        b"{}",
        b'{"op": 3}',
        b'{"op": ["hello"]}',
        b'{"op": "exec"}',
        b"GET / HTTP",
    ],
)
def test_what_is_no_message_is_refused(payload):
    with pytest.raises(ProtocolError, match=r"no JSON|no message that is known"):
        decode(payload, TO_SERVER)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("process", -1),
        ("process", True),
        ("process", 1.0),
        ("process", "1"),
        ("processes", 10**400),
        ("at", None),
        ("at", "x" * 100_000),
        ("at", "\ud800"),
        ("seconds", -1),
        ("seconds", 10**400),
        ("seconds", "3"),
        ("facts", "z" * 32),
        ("facts", {}),
        ("devices", 2),
        ("stopped", 3),
        ("code", 256),
    ],
)
def test_an_impossible_field_is_refused_by_name(field, value):
    assert decode(encode(HELLO), TO_SERVER) == HELLO
    with pytest.raises(ProtocolError, match=f"impossible fields: '{field}'"):
        decode(json.dumps(HELLO | {field: value}).encode(), TO_SERVER)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_neither_sent_nor_taken(number):
    with pytest.raises(ProtocolError, match=f"{number} is no number"):
        decode(f'{{"op": "gather", "name": "x", "value": [{number}]}}'.encode(), TO_SERVER)
    with pytest.raises(ProtocolError):
        encode({"op": "gather", "name": "x", "value": float(number)})


@pytest.mark.parametrize("deep", [b"[" * 10**5, b'{"a":' * 10**5, b"[" * 33 + b"]" * 33])
def test_what_is_deep_is_refused_before_it_is_parsed(deep):
    with pytest.raises(ProtocolError, match="more than 32 deep"):
        decode(b'{"op":"gather","name":"x","value":' + deep + b"}", TO_SERVER)


def test_what_is_deep_is_not_sent():
    value = []
    for _ in range(10**5):
        value = [value]
    for nested in (value, [[[]]] * 3):
        message = {"op": "gather", "name": "x", "value": nested}
        if nested is value:
            with pytest.raises(ProtocolError):
                encode(message)
        else:
            assert decode(encode(message), TO_SERVER) == message
    while value:
        value = value[0]  # its end would be as deep as its beginning


def test_brackets_in_texts_are_no_depth():
    for text in ("[" * 1000, '\\"[[' * 100, "]" * 50, '"'):
        message = {"op": "gather", "name": "x", "value": [text, "[" * 40]}
        assert decode(encode(message), TO_SERVER) == message


def test_random_bytes_are_refused_without_another_error():
    """Also within a frame that is rightly signed, as of a process gone mad."""
    dice = random.Random(os.environ.get("REDCO_TEST_SEED", "0"))
    whole = encode(HELLO)
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(dice.randrange(1, 8)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        for payload in (bytes(data), dice.randbytes(dice.randrange(100)), whole[: dice.randrange(len(whole))]):
            try:
                found = decode(payload, TO_SERVER)
            except ProtocolError:
                continue
            assert found["op"] in TO_SERVER


def meeting_of(ours, theirs):
    """What the handshake comes to on the side of a process, and of the server."""
    near, far = socket.socketpair()
    found = []

    def serve():
        try:
            found.append(admit(far, theirs))
        except OtherSecretError as error:
            far.send(error.args[0])
            found.append(None)
            far.close()

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        return introduce(near, ours, time.monotonic() + 5), found, serving
    except OtherSecretError:
        near.close()
        serving.join()
        return None, found, serving


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_both_ends_with_one_secret_understand_each_other(secret):
    process, found, serving = meeting_of(secret, secret)
    serving.join()
    (server,) = found
    process.send(**HELLO)
    assert server.receive(5) == HELLO
    server.send(op="go")
    assert process.receive(5) == {"op": "go"}
    for end in (process, server):
        end.close()


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, SECRET[::-1]), (b"", SECRET), (SECRET, b"")])
def test_another_secret_is_noticed_on_both_ends(ours, theirs):
    process, found, _ = meeting_of(ours, theirs)
    assert process is None
    assert found == [None]


def answered(words, seconds=1.0):
    """What a process comes to when these words answer it."""
    near, far = socket.socketpair()
    with near, far:
        far.sendall(words)
        if not words:
            far.shutdown(socket.SHUT_WR)
        with pytest.raises(HandshakeError) as error:
            introduce(near, SECRET, time.monotonic() + seconds)
    return error.type


def test_what_answers_a_process_and_is_no_server_is_told_apart():
    assert answered(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3) is HandshakeError
    assert answered(b"H") is HandshakeError  # waits for no more
    assert answered(MAGIC + b"n" * 32 + b"\x00" + bytes(32)) is OtherSecretError
    assert (
        answered(MAGIC + b"n" * 32 + b"\x01" + bytes(32)) is OtherSecretError
    )  # says that all is well, proves nothing
    assert answered(b"") is UnansweredError
    assert answered(MAGIC[:4], seconds=0.3) is UnansweredError


@pytest.mark.parametrize(("changed", "error"), [(1, OtherSecretError), (0, UnansweredError)])
def test_a_proof_that_is_sent_back_proves_nothing(changed, error):
    """A server without the secret that answers with what the process said, or a connection that met itself."""
    near, far = socket.socketpair()

    def reflect():
        heard = far.recv(48)
        far.sendall(heard[:-1] + bytes([heard[-1] ^ changed]))
        with contextlib.suppress(OSError):
            far.sendall(b"\x01" + far.recv(32))

    reflecting = threading.Thread(target=reflect)
    reflecting.start()
    with pytest.raises(error):
        introduce(near, SECRET, time.monotonic() + 5)
    near.close()
    reflecting.join()
    far.close()


def test_no_two_connections_have_a_key_in_common():
    one, two = (handshake.SessionKeys(SECRET, bytes([n]) * 64) for n in (1, 2))
    keys = [*one.messages, *two.messages, one.process_proof, two.process_proof, one.server_proof, two.server_proof]
    assert len(set(keys)) == 8


def test_texts_are_sent_as_they_can_be():
    assert messages.readable("a\udc80" + "x" * 20_000) == "a?" + "x" * 9_998
