"""Keys, tenants and rates: who may call, which configurations are refused, and secrecy of keys."""

import hashlib
import hmac
import io
import logging
import pickle
import random
from fractions import Fraction

import pydantic
import pytest
import yaml

from cfg_core.errors import (
    AuthenticationError,
    ConfigError,
    OverloadedError,
    PermissionDeniedError,
    RequestError,
)
from deployments.access import main
from deployments.admission import tenants
from deployments.admission.rates import MINUTE_S, Bucket
from deployments.admission.tenants import ANONYMOUS, Gate
from deployments.config.access import AccessArgs, KeyArgs, digest_of
from deployments.http.errors import http_error
from deployments.requests.guidance_fields import models_of, read_guidance

SECRET = "sk-very-secret-0123456789"


def sha256(key):
    return hashlib.sha256(key.encode()).hexdigest()


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def gate_of(*keys, now=None):
    """A gate for `keys`. Each of them is a name, or a mapping with further fields.

    The name is also the API key itself.
    """
    entries = [{"name": key} if isinstance(key, str) else key for key in keys]
    args = AccessArgs.model_validate(
        {"keys": [{"sha256": sha256(entry["name"]), **entry} for entry in entries]}
    )
    return Gate(args.resolved(), now or Clock())


# --- configuration --------------------------------------------------------------------------------


def test_defaults():
    args = AccessArgs()
    assert args.keys == ()
    assert args.max_body_bytes == 8 * 1024 * 1024
    assert not args.log_prompts


def test_args_are_frozen():
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        AccessArgs().log_prompts = True
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        KeyArgs(name="a", env="A").name = "b"


GOOD = {"name": "alice", "sha256": sha256("alice")}


OF_A_KEY = [
    # what is wrong with GOOD, words of the error
    ({"modles": ["m"]}, "unknown key `modles` in `access.keys`: did you mean `models`?"),
    ({"name": "a b"}, "'a b' is not a valid key name: use 1 to 64"),
    ({"name": "a" * 65}, "is not a valid key name"),
    ({"name": "a\n"}, "is not a valid key name"),
    ({"name": "anonymous"}, "`anonymous` in `access.keys` is the name of callers without"),
    ({"env": "KEY"}, "key `alice` needs either `sha256` or `env`, and both are set"),
    ({"sha256": None}, "key `alice` needs either `sha256` or `env`, and neither is set"),
    ({"sha256": "abc"}, "`sha256` of key `alice` must be 64 hexadecimal digits"),
    ({"sha256": "g" * 64}, "python -m deployments.access --hash"),
    ({"sha256": None, "env": "no-name"}, "`env` of key `alice` is not the name of an environment"),
    ({"models": []}, "at least 1 item"),
    ({"requests_per_minute": 0}, "greater than or equal to 1"),
    ({"tokens_per_minute": 0}, "greater than or equal to 1"),
    ({"max_streams": 0}, "greater than or equal to 1"),
    ({"weight": 0}, "greater than 0"),
    ({"weight": float("inf")}, "finite number"),
]
OF_TWO_KEYS = [
    ([GOOD, {**GOOD, "sha256": sha256("x")}], "two keys have the name `alice`: give each a `name`"),
    ([GOOD, {**GOOD, "name": "bob"}], "`alice` and `bob` are the same key: make a new key"),
    (
        [GOOD, {"name": "bob", "sha256": GOOD["sha256"].upper()}],
        "`alice` and `bob` are the same key",
    ),
    ([{"name": "a", "env": "K"}, {"name": "b", "env": "K"}], "`a` and `b` are the same key"),
]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"keis": []}, "unknown key `keis` in `access`: did you mean `keys`?"),
        ({"max_body_bytes": 0}, "greater than or equal to 1"),
        ({"keys": [{"sha256": sha256("x")}]}, "Field required"),
        *(({"keys": [{**GOOD, **wrong}]}, words) for wrong, words in OF_A_KEY),
        *(({"keys": keys}, words) for keys, words in OF_TWO_KEYS),
    ],
    ids=str,
)
def test_mistakes(values, words):
    with pytest.raises(pydantic.ValidationError) as error:
        AccessArgs.model_validate(values)
    assert words in str(error.value)


def test_the_environment_is_read_when_resolved(monkeypatch):
    args = AccessArgs.model_validate(
        {"keys": [{"name": "alice", "env": "ALICE_KEY", "models": ["m"]}, {**GOOD, "name": "b"}]}
    )
    monkeypatch.setenv("ALICE_KEY", SECRET)
    resolved = args.resolved()
    assert resolved.keys[0] == KeyArgs(name="alice", sha256=sha256(SECRET), models=("m",))
    assert resolved.keys[1] == args.keys[1]
    assert resolved.resolved() == resolved
    assert Gate(resolved).authenticate(f"Bearer {SECRET}").name == "alice"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            None,
            "the environment variable in `env` of key `alice` is not set, or empty: set it where",
        ),
        ("", "is not set, or empty"),
        (SECRET + "\n", "key `alice` holds spaces, line ends, or characters other than ASCII"),
        ("schlüssel", "no client can send it in a header"),
    ],
)
def test_bad_values_in_the_environment_are_refused(monkeypatch, value, words):
    monkeypatch.delenv("ALICE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("ALICE_KEY", value)
    with pytest.raises(ConfigError, match="alice") as error:
        AccessArgs(keys=(KeyArgs(name="alice", env="ALICE_KEY"),)).resolved()
    assert words in str(error.value)
    assert not value or value.strip() not in str(error.value)


def test_one_key_under_two_variables(monkeypatch):
    monkeypatch.setenv("ONE", SECRET)
    monkeypatch.setenv("TWO", SECRET)
    args = AccessArgs(keys=(KeyArgs(name="a", env="ONE"), KeyArgs(name="b", env="TWO")))
    with pytest.raises(ConfigError, match="`a` and `b` are the same key"):
        args.resolved()


def test_unresolved_keys_are_not_accepted():
    with pytest.raises(AssertionError, match="resolved"):
        Gate(AccessArgs(keys=(KeyArgs(name="alice", env="ALICE_KEY"),)))


def test_a_key_is_never_shown(monkeypatch, caplog):
    """No object, error message or log line shows it."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("ALICE_KEY", SECRET)
    args = AccessArgs(keys=(KeyArgs(name="alice", env="ALICE_KEY"),))
    gate = Gate(args.resolved())
    shown = [
        args,
        args.keys[0],
        args.resolved(),
        gate,
        gate.authenticate(f"Bearer {SECRET}"),
        vars(gate),
    ]
    shown += [args.resolved().model_dump(), pickle.dumps(args.resolved())]
    with pytest.raises(AuthenticationError) as refusal:
        gate.authenticate(f"Bearer {SECRET}x")
    shown += [refusal.value, caplog.text]
    assert not any(SECRET in text for thing in shown for text in (str(thing), repr(thing)))


@pytest.mark.parametrize(
    "entry", [{"sha256": SECRET}, {"env": SECRET}, {"sha256": SECRET, "weight": -1}]
)
def test_a_key_in_the_wrong_place_is_not_shown_either(entry):
    with pytest.raises(pydantic.ValidationError) as error:
        AccessArgs.model_validate({"keys": [{"name": "alice", **entry}]})
    for text in (str(error.value), repr(error.value)):
        assert not any(part in text for part in (SECRET[:6], SECRET[-6:])), (
            "pydantic shortens long values in the middle"
        )


# --- authentication -------------------------------------------------------------------------------


def test_without_keys_everybody_is_anonymous():
    gate = Gate(AccessArgs())
    for header in (None, "", "Bearer x", "nonsense"):
        assert gate.authenticate(header) is ANONYMOUS
    gate.allow_model(ANONYMOUS, "any")
    for _ in range(1000):
        gate.charge(ANONYMOUS, 10**9)
    gate.check_integrity()


@pytest.mark.parametrize("header", ["Bearer alice", "bearer alice", "BEARER  alice "])
def test_bearer_tokens(header):
    assert gate_of("alice", "bob").authenticate(header).name == "alice"


def test_x_api_key():
    gate = gate_of("alice", "bob")
    assert gate.authenticate(None, "bob").name == "bob"
    assert gate.authenticate("Bearer alice", "bob").name == "alice"
    with pytest.raises(AuthenticationError, match="not understood"):
        gate.authenticate("Basic YWxpY2U=", "bob")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (None, "An API key is needed: send the header `Authorization: Bearer KEY`"),
        ("", "not understood: send `Authorization: Bearer KEY`"),
        ("alice", "not understood"),
        ("Bearer", "not understood"),
        ("Bearer ", "not understood"),
        ("Basic alice", "not understood"),
        ("Bearer,alice", "not understood"),
        ("Bearer Alice", "not known here"),
        ("Bearer alic", "not known here"),
        ("Bearer alice bob", "not known here"),
        ("Bearer \xff\u20ac", "not known here"),
        (f"Bearer {sha256('alice')}", "not known here"),
    ],
)
def test_refused_headers(header, words):
    with pytest.raises(AuthenticationError) as refusal:
        gate_of("alice").authenticate(header)
    assert words in str(refusal.value)


def test_an_empty_x_api_key_is_a_missing_key():
    with pytest.raises(AuthenticationError, match="An API key is needed"):
        gate_of("alice").authenticate(None, "")


@pytest.mark.parametrize("key", ["a", "b", "c", "wrong"])
def test_every_key_is_compared_in_constant_time(monkeypatch, key):
    """Every request compares all digests, and only by hmac.compare_digest."""
    compared = []

    def compare_digest(expected, given):
        compared.append((expected, given))
        return original(expected, given)

    original = hmac.compare_digest
    monkeypatch.setattr(tenants.hmac, "compare_digest", compare_digest)
    try:
        gate_of("a", "b", "c").authenticate(f"Bearer {key}")
    except AuthenticationError:
        assert key == "wrong"
    assert compared == [(digest_of(name), digest_of(key)) for name in "abc"]


def test_the_tenant_carries_its_limits():
    fields = {
        "requests_per_minute": 1,
        "tokens_per_minute": 2,
        "max_streams": 3,
        "weight": 4.0,
        "min_priority": 5,
    }
    tenant = gate_of({"name": "alice", **fields}).authenticate("Bearer alice")
    assert fields.items() <= vars(tenant).items()
    assert tenant.models is None
    assert hash(tenant) == hash(pickle.loads(pickle.dumps(tenant)))


def test_models():
    gate = gate_of({"name": "alice", "models": ["small", "large"]}, "bob")
    alice, bob = gate.authenticate("Bearer alice"), gate.authenticate("Bearer bob")
    gate.allow_model(alice, "large")
    gate.allow_model(bob, "whatever")
    with pytest.raises(
        PermissionDeniedError, match="may not use 'secret': use small, large"
    ) as refusal:
        gate.allow_model(alice, "secret")
    assert refusal.value.param == "model"


def test_an_adapter_of_a_stream_is_a_model_of_the_request():
    """Otherwise a key could use, in a stream, what it may not name as `model`."""
    gate = gate_of({"name": "alice", "models": ["small"]})
    alice = gate.authenticate("Bearer alice")

    def check(*loras):
        streams = [{"weight": 1, "prompt": "a", "lora": lora} for lora in loras]
        body = {"model": "small", "guidance_streams": streams}
        for name in models_of(body, read_guidance(body, "completion"), "base"):
            gate.allow_model(alice, name)

    check(None, "small")
    for lora, name in (("secret", "secret"), (False, "base")):
        with pytest.raises(PermissionDeniedError, match=f"may not use '{name}'"):
            check(None, lora)


@pytest.mark.parametrize(
    ("model", "loras", "names"),
    [
        (None, None, ["base"]),
        ("a", None, ["a"]),
        ("a", ["b", False, "a", None, "b"], ["a", "b", "base"]),
        (None, [False], ["base"]),
    ],
)
def test_models_of_a_request(model, loras, names):
    body = {"model": model, "prompt": "x"}
    if loras is not None:
        streams = [{"weight": 1, "prompt": "a", "lora": lora} for lora in loras]
        body["guidance_streams"] = streams
    assert models_of(body, read_guidance(body, "completion"), "base") == names


# --- rates ----------------------------------------------------------------------------------------


def charged(gate, name, num_tokens):
    """None if it passed, else the seconds to wait."""
    try:
        gate.charge(gate.authenticate(f"Bearer {name}"), num_tokens)
    except OverloadedError as error:
        return error.retry_after_s
    finally:
        gate.check_integrity()
    return None


def test_a_minutes_requests_may_come_at_once(clock):
    gate = gate_of({"name": "alice", "requests_per_minute": 3}, "bob", now=clock)
    assert [charged(gate, "alice", 0) for _ in range(5)] == [None, None, None, 20.0, 20.0]
    assert charged(gate, "bob", 10**9) is None


def test_the_longer_wait_of_two_rates_is_reported(clock):
    gate = gate_of({"name": "alice", "requests_per_minute": 1, "tokens_per_minute": 60}, now=clock)
    assert charged(gate, "alice", 60) is None
    clock.now_s += 30.0
    assert charged(gate, "alice", 30) == 30.0  # tokens are left, requests are not
    with pytest.raises(
        OverloadedError, match="is limited to 1 requests per minute: try again in 30 s"
    ):
        gate.charge(gate.authenticate("Bearer alice"), 30)
    assert charged(gate, "alice", 60) == 30.0


def test_a_refused_request_takes_nothing(clock):
    gate = gate_of({"name": "alice", "requests_per_minute": 2, "tokens_per_minute": 100}, now=clock)
    assert charged(gate, "alice", 100) is None
    for _ in range(10):
        assert charged(gate, "alice", 50) == 30.0
    assert charged(gate, "alice", 0) is None


def test_a_request_above_a_minutes_tokens_can_never_pass(clock):
    gate = gate_of({"name": "alice", "tokens_per_minute": 100}, now=clock)
    for _ in range(3):
        with pytest.raises(
            RequestError, match=r"asks for 101 tokens .* may use 100 per minute: lower max_tokens"
        ) as refusal:
            gate.charge(gate.authenticate("Bearer alice"), 101)
        assert refusal.value.param == "max_tokens"
        assert http_error(refusal.value).status == 400
    assert charged(gate, "alice", 100) is None


def test_retry_after_is_rounded_up_to_whole_seconds(clock):
    gate = gate_of({"name": "alice", "tokens_per_minute": 70}, now=clock)
    charged(gate, "alice", 70)
    with pytest.raises(OverloadedError, match="try again in 9 s") as refusal:
        gate.charge(gate.authenticate("Bearer alice"), 10)
    assert refusal.value.retry_after_s == pytest.approx(60 / 7)
    assert http_error(refusal.value).headers["Retry-After"] == "9"
    clock.now_s += 9
    assert charged(gate, "alice", 10) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_request_passes_after_the_reported_wait_and_not_before(seed, clock):
    """The oracle is a bucket in exact fractions that a plain loop refills.

    The clock counts in 1/1024 s between waits, so that only the waits themselves are rounded. A
    request that comes 1 ms before its wait is over must be refused.
    """
    rng = random.Random(seed)
    limit = rng.randrange(1, 10_000)
    gate = gate_of({"name": "alice", "tokens_per_minute": limit}, now=clock)
    level, then = Fraction(limit), Fraction(clock.now_s)
    for _ in range(200):
        clock.now_s += rng.choice([0, rng.randrange(2**14) / 1024])
        amount = rng.randrange(limit + 1)
        level, then = (
            min(Fraction(limit), level + (Fraction(clock.now_s) - then) * limit / 60),
            Fraction(clock.now_s),
        )
        wait = charged(gate, "alice", amount)
        assert (wait or 0.0) == pytest.approx(
            float(max(Fraction(0), (amount - level) * 60 / limit)), abs=1e-4
        )
        if wait is not None and wait > 0.002:
            began = clock.now_s
            clock.now_s = began + wait - 0.001
            assert charged(gate, "alice", amount) is not None
            clock.now_s = began + wait
            assert charged(gate, "alice", amount) is None
            level, then = Fraction(0), Fraction(clock.now_s)
        elif wait is None:
            level -= amount


def test_integrity_is_checked():
    bucket = Bucket(10)
    bucket.take(10, 0.0)
    bucket.check_integrity(0.0)
    bucket.take(1, 0.0)
    with pytest.raises(AssertionError, match="more was taken"):
        bucket.check_integrity(0.0)
    assert bucket.wait_s(10, 0.0) == pytest.approx(1.1 * MINUTE_S)


# --- making keys ----------------------------------------------------------------------------------


def test_a_new_key(capsys):
    main([])
    printed = capsys.readouterr()
    (entry,) = yaml.safe_load(printed.out)
    key = printed.err.splitlines()[0].rpartition(" ")[2]
    assert entry["sha256"] == sha256(key)
    assert len(key) >= 43
    assert key not in printed.out
    assert KeyArgs(**entry).name == "CHANGE-ME"
    main([])
    assert capsys.readouterr().out != printed.out


def test_the_digest_of_a_key(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(SECRET + "\n"))
    main(["--hash"])
    assert capsys.readouterr().out == sha256(SECRET) + "\n"


@pytest.mark.parametrize("line", ["", "\n", "two words\n", "schlüssel\n"])
def test_a_malformed_key_gets_no_digest(monkeypatch, line):
    monkeypatch.setattr("sys.stdin", io.StringIO(line))
    with pytest.raises(SystemExit, match="alone on one line"):
        main(["--hash"])
