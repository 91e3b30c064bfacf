"""Whether processes may meet: with a secret, or on one machine only; and at which addresses they listen."""

import socket

import pytest

from redco_cli.errors import EXIT_USAGE, RedcoError, UsageError
from redco_cli.recipe.load import load_recipe
from redco_cli.runtime.doctor import examine
from redco_cli.runtime.peers import addresses
from redco_cli.runtime.peers.addresses import is_loopback, listening_address, reached_address
from redco_cli.runtime.peers.secret import describe_secret, find_secret, insecure_warning, new_secret
from redco_cli.runtime.rendezvous import join

LINE = 'export REDCO_SECRET=$(python3 -c "import secrets; print(secrets.token_hex(16))")'
GIVEN = "0123456789abcdef"


def test_a_secret_that_is_set_is_the_secret():
    for host in ("localhost", "node1"):
        assert find_secret({"REDCO_SECRET": GIVEN}, host) == GIVEN.encode()
        assert insecure_warning(GIVEN.encode(), host) is None
    assert len({new_secret() for _ in range(100)}) == 100
    assert find_secret({"REDCO_SECRET": new_secret()}, "node1")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_on_one_machine_none_is_needed(host):
    assert find_secret({}, host) == b""
    assert insecure_warning(b"", host) is None


@pytest.mark.parametrize(
    "host", ["node1", "10.0.0.1", "0.0.0.0", "::", "fe80::1", "localhost.evil.example", "127.evil"]
)
def test_elsewhere_none_is_refused_with_the_line_that_sets_one(host):
    with pytest.raises(UsageError) as refused:
        find_secret({}, host)
    assert refused.value.exit_code == EXIT_USAGE  # a JobSet does not try that again
    assert str(refused.value) == (
        f"environment REDCO_SECRET: is not set, and whoever reaches {host} could take part in this run, end it or read "
        f"what it says\n  -> make one, and give its value to all processes alike: {LINE}\n"
        "     or, on a network that nobody else can reach: export REDCO_INSECURE=1"
    )
    assert find_secret({"REDCO_INSECURE": "1"}, host) == b""
    assert insecure_warning(b"", host).startswith(f"REDCO_INSECURE=1: whoever reaches {host} can take part in this run")


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"REDCO_SECRET": ""}, "environment REDCO_SECRET: is empty\n  -> make one"),
        (
            {"REDCO_SECRET": "x" * 15},
            "environment REDCO_SECRET: has 15 characters, which can be guessed\n  -> make one",
        ),
        ({"REDCO_INSECURE": "yes"}, "environment REDCO_INSECURE: 'yes' is neither 0 nor 1\n"),
    ],
)
def test_what_is_no_secret_is_refused_even_on_one_machine(environ, problem):
    with pytest.raises(UsageError) as refused:
        find_secret(environ, "localhost")
    assert str(refused.value).startswith(problem)
    assert "xxx" not in str(refused.value)


@pytest.mark.parametrize("process", ["0", "1"])
def test_every_process_is_refused_before_anything_is_opened(process, monkeypatch, tmp_path):
    for name, value in {"NUM_PROCESSES": "2", "PROCESS_ID": process, "COORDINATOR": "node1:8476"}.items():
        monkeypatch.setenv(f"REDCO_{name}", value)
    monkeypatch.setattr(socket, "socket", None)
    monkeypatch.setattr(join, "meet", None)
    (tmp_path / "recipe.yaml").write_text("plugin: {module: x.py}\noutput_dir: run\n")
    loaded = load_recipe(str(tmp_path / "recipe.yaml"), ["data.train={path: x}", "train.steps=1"])
    with pytest.raises(UsageError, match="REDCO_SECRET: is not set"), join.joined(loaded, print, print):
        pass


def test_what_is_accepted_without_one_is_warned_of(monkeypatch, tmp_path):
    def meet(*_):
        raise RedcoError("", "met")

    variables = {"NUM_PROCESSES": "2", "PROCESS_ID": "0", "COORDINATOR": "node1:8476", "INSECURE": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"REDCO_{name}", value)
    monkeypatch.setattr(join, "meet", meet)
    (tmp_path / "recipe.yaml").write_text("plugin: {module: x.py}\noutput_dir: run\n")
    loaded, told = load_recipe(str(tmp_path / "recipe.yaml"), ["data.train={path: x}", "train.steps=1"]), []
    with pytest.raises(RedcoError, match="met"), join.joined(loaded, told.append, print):
        pass
    assert told[1].startswith("warning: REDCO_INSECURE=1: whoever reaches node1 can take part in this run")


def test_the_variables_are_no_keys_of_a_recipe(monkeypatch, tmp_path):
    monkeypatch.setenv("REDCO_SECRET", GIVEN)
    monkeypatch.setenv("REDCO_INSECURE", "0")
    (tmp_path / "recipe.yaml").write_text("plugin: {module: x.py}\noutput_dir: run\n")
    loaded = load_recipe(str(tmp_path / "recipe.yaml"), ["data.train={path: x}", "train.steps=1"])
    assert GIVEN not in str(loaded)


@pytest.mark.parametrize(
    ("environ", "host", "text"),
    [
        ({"REDCO_SECRET": GIVEN}, "node1", "REDCO_SECRET is set"),
        ({"REDCO_SECRET": GIVEN}, None, "REDCO_SECRET is set"),
        ({}, None, "not set; needed for processes on several machines only"),
        ({}, "localhost", "not set; needed for processes on several machines only"),
        ({"REDCO_INSECURE": "1"}, "node1", "not set; accepted by REDCO_INSECURE=1"),
        ({"REDCO_SECRET": "short"}, None, "REDCO_SECRET has 5 characters, which can be guessed"),
    ],
)
def test_the_doctor_says_whether_there_is_one(environ, host, text):
    assert describe_secret(environ, host) == text


def test_the_doctor_says_that_a_run_would_be_refused():
    assert describe_secret({}, "node1").startswith("REDCO_SECRET is not set, and whoever reaches node1 could take part")


def test_the_doctor_does_not_say_what_it_is(monkeypatch):
    monkeypatch.setenv("REDCO_SECRET", GIVEN)
    found = examine()
    assert found["secret"] == "REDCO_SECRET is set"
    assert GIVEN not in str(found)


def resolving(monkeypatch, **names):
    monkeypatch.setattr(addresses, "_resolved", lambda host: names.get(host, []))


def test_a_coordinator_on_this_machine_is_listened_for_on_loopback_only(monkeypatch):
    resolving(monkeypatch, localhost=["::1", "127.0.0.1"], v6=["::1"])
    assert listening_address("localhost") == "127.0.0.1"
    assert listening_address("ip6-localhost") == "127.0.0.1"
    monkeypatch.undo()
    assert listening_address("127.0.0.1") == "127.0.0.1"
    assert listening_address("::1") == "::1"


def test_a_name_is_listened_for_at_its_own_address_where_it_is_of_this_machine(monkeypatch):
    resolving(monkeypatch, node1=["10.1.2.3", "10.9.9.9"], other=["10.9.9.9"], debian=["127.0.1.1", "10.1.2.3"])
    monkeypatch.setattr(addresses, "_is_own", lambda address: address == "10.1.2.3")
    assert listening_address("node1") == "10.1.2.3"
    assert listening_address("other") == ""  # behind a translation of addresses, such as a service's
    assert listening_address("debian") == ""  # on another machine that name is no loopback
    assert listening_address("unknown") == ""


@pytest.mark.parametrize(
    ("found", "address"),
    [
        (
            ["fd00::2", "192.0.2.2"],
            "",
        ),  # all interfaces, by nss-myhostname: others know one, and not this machine which
        (["192.0.2.2", "192.0.2.3"], ""),  # two network interfaces
        (["192.0.2.2", "192.0.2.2"], "192.0.2.2"),
        (["192.0.2.2", "10.9.9.9"], "192.0.2.2"),
    ],
)
def test_of_several_own_addresses_none_is_listened_at_alone(found, address, monkeypatch):
    resolving(monkeypatch, node1=found)
    monkeypatch.setattr(addresses, "_is_own", lambda one: one != "10.9.9.9")
    assert listening_address("node1") == address


def test_a_coordinator_on_this_machine_is_looked_for_where_it_listens(monkeypatch):
    resolving(monkeypatch, localhost=["::1", "127.0.0.1"], node1=["10.1.2.3"])
    assert reached_address("localhost") == "127.0.0.1"
    assert reached_address("node1") == "node1"  # resolved anew at each attempt


@pytest.mark.parametrize(("address", "is_own"), [("127.0.0.1", True), ("0.0.0.0", False), ("192.0.2.1", False)])
def test_an_address_of_this_machine_can_be_bound(address, is_own):
    assert addresses._is_own(address) == is_own


def test_loopback_is_told_by_the_text_alone(monkeypatch):
    """All processes must come to one answer, whatever their resolvers say."""
    monkeypatch.setattr(socket, "getaddrinfo", None)
    assert is_loopback("localhost")
    assert not is_loopback("node1")
