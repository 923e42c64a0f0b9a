"""Which web pages may call the server, and by which names it may be called."""

import socket

import pytest
from starlette.datastructures import Headers

from cfg_core.errors import ConfigError, ForeignOriginError, RequestError, UnknownHostError
from deployments.config.access import AccessArgs, digest_of
from deployments.config.http import HttpArgs
from deployments.ingress.bodies import check_media_type
from deployments.ingress.policy import Policy
from deployments.ingress.sites import Sites
from deployments.requests.template_kwargs import check_template_kwargs
from tests.unit.test_http_guard import Client, check_refusal, header, never, ok

KEYS = {"keys": [{"name": "alice", "sha256": digest_of("k").hex()}]}
EVIL = "https://evil.example"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def sites(has_keys=False, **fields):
    return Sites(HttpArgs(**fields), has_keys)


def policy(access=None, **fields):
    return Policy.of(AccessArgs.model_validate(access or {}), http=HttpArgs(**fields))


# --- names ----------------------------------------------------------------------------------------

KNOWN = (
    "127.0.0.1:8000",
    "[::1]:8000",
    "[::1]",
    "10.2.3.4",
    "localhost",
    "LOCALHOST:1",
    "app.localhost",
    "localhost.",
    "server_1",
    "cfg-serve.default.svc",
    "cfg-serve.default.svc.cluster.local:8000",
    "ip-10-0-0-1.ec2.internal",
    socket.gethostname(),
)
FOREIGN = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example")
ILL_FORMED = ("[", "a b", "a/b", "a@b", "a:b", "a:1:2", "[::1", "\xff", "a?b", "a#b", "")


def hosts(*given):
    return Headers(raw=[(b"host", host.encode("latin-1")) for host in given])


@pytest.mark.parametrize("host", KNOWN)
def test_names_that_no_stranger_can_own_are_known(host):
    sites().check_host(hosts(host))


@pytest.mark.parametrize("host", FOREIGN)
def test_a_name_that_a_stranger_could_own_is_foreign(host):
    with pytest.raises(UnknownHostError, match=r"http\.allowed_hosts"):
        sites().check_host(hosts(host))
    with pytest.raises(UnknownHostError):
        sites().check_host(hosts("localhost", host))
    sites(has_keys=True).check_host(hosts(host))
    sites(allowed_hosts=["*"]).check_host(hosts(host))


@pytest.mark.parametrize("host", ILL_FORMED)
@pytest.mark.parametrize("has_keys", [False, True])
def test_an_ill_formed_name_is_refused(host, has_keys):
    with pytest.raises(RequestError, match="Host"):
        sites(has_keys).check_host(hosts(host))


def test_names_of_the_configuration():
    made = sites(has_keys=True, allowed_hosts=["A.example", "*.b.example"])
    for host in ("a.example:443", "x.b.example", "y.x.b.example", "127.0.0.1"):
        made.check_host(hosts(host))
    for host in ("b.example", "x.a.example", "xb.example"):
        with pytest.raises(UnknownHostError):
            made.check_host(hosts(host))


# --- origins --------------------------------------------------------------------------------------


def page(origin, host="127.0.0.1:8000", **more):
    return Headers({"origin": origin, "host": host, **more})


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "http://127.0.0.1", "https://[::1]:5", "http://app.localhost:1"],
)
def test_pages_of_this_machine_may_read(origin):
    assert sites().allows(page(origin))
    with pytest.raises(ForeignOriginError):
        sites(cors_origins=["https://chat.example"]).allows(page(origin))


@pytest.mark.parametrize(
    "origin",
    [
        EVIL,
        "null",
        "http://localhost.evil.example",
        "http://127.0.0.1.evil.example",
        "http://evil.example#localhost",
        "http://notlocalhost",
        "file://",
        "http://[",
        "\xff",
        "",
    ],
)
def test_pages_of_strangers_are_refused_unless_there_are_keys(origin):
    with pytest.raises(ForeignOriginError, match=r"http\.cors_origins"):
        sites().allows(page(origin))
    assert not sites(has_keys=True).allows(page(origin))
    assert sites(cors_origins=["*"]).allows(page(origin))


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("https://gpu7.corp", "gpu7.corp"),
        ("https://gpu7.corp", "GPU7.corp:443"),
        ("http://gpu7.corp:80", "gpu7.corp"),
    ],
)
def test_the_servers_own_pages_may_ask_and_need_no_headers(origin, host):
    assert not sites().allows(page(origin, host))


def test_the_browser_knows_its_own_page_behind_a_proxy():
    behind = page("https://chat.example", "127.0.0.1:8000", **{"sec-fetch-site": "same-origin"})
    assert not sites().allows(behind)
    with pytest.raises(ForeignOriginError):
        sites().allows(page("https://chat.example", **{"sec-fetch-site": "cross-site"}))


def test_who_is_no_page_may_ask():
    assert not sites().allows(Headers({"host": "127.0.0.1"}))


# --- in the guard ---------------------------------------------------------------------------------


async def test_a_strangers_page_reaches_nothing():
    client = Client(never, policy())
    for method in ("GET", "POST"):
        told = await client.call(headers={"origin": EVIL, "host": "127.0.0.1"}, method=method)
        check_refusal(told, 403, "permission_error")
        assert header(told[1], "access-control-allow-origin") == []
    told = await client.call(headers={"host": "evil.example"})
    check_refusal(told, 421, "invalid_request_error")
    told = await client.call(headers={"origin": EVIL, **PREFLIGHT}, method="OPTIONS")
    check_refusal(told, 403, "permission_error")


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_come_by_any_name(path):
    assert (await Client(ok, policy()).call(path, {"host": "lb.example"}))[0] == 200


@pytest.mark.parametrize("origins", [["*"], [EVIL]])
async def test_an_allowed_page_gets_its_preflight_and_reads_answers_and_errors(origins):
    client = Client(ok, policy(KEYS, cors_origins=origins))
    status, headers, _ = await client.call(headers={"origin": EVIL, **PREFLIGHT}, method="OPTIONS")
    assert status == 200
    assert header(headers, "access-control-allow-headers") == ["authorization,content-type"]
    allowed = "*" if origins == ["*"] else EVIL
    assert header(headers, "access-control-allow-origin") == [allowed]
    told = await client.call(headers={"origin": EVIL})
    check_refusal(told, 401, "authentication_error")
    assert header(told[1], "access-control-allow-origin") == [allowed]
    status, headers, _ = await client.call(headers={"origin": EVIL, "authorization": "Bearer k"})
    assert (status, header(headers, "access-control-allow-origin")) == (200, [allowed])


async def test_with_keys_a_strangers_page_cannot_read():
    client = Client(ok, policy(KEYS))
    status, headers, _ = await client.call(headers={"origin": EVIL, "authorization": "Bearer k"})
    assert (status, header(headers, "access-control-allow-origin")) == (200, [])
    check_refusal(
        await client.call(headers={"origin": EVIL, **PREFLIGHT}, method="OPTIONS"),
        403,
        "permission_error",
    )


async def test_no_answer_to_a_get_can_be_framed():
    client = Client(ok, policy())
    headers = (await client.call(method="GET"))[1]
    assert header(headers, "x-frame-options") == ["DENY"]
    assert "frame-ancestors 'none'" in header(headers, "content-security-policy")[0]


# --- proxies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trusted", "peer", "forwarded", "client"),
    [
        ((), "127.0.0.1", "1.2.3.4", "127.0.0.1"),
        (("127.0.0.1",), "127.0.0.1", "1.2.3.4", "1.2.3.4"),
        (("127.0.0.1",), "127.0.0.1", "9.9.9.9, 1.2.3.4", "1.2.3.4"),
        (("127.0.0.1",), "10.0.0.1", "1.2.3.4", "10.0.0.1"),
        (("10.0.0.0/8",), "10.0.0.1", "1.2.3.4, 10.7.7.7", "1.2.3.4"),
    ],
)
async def test_only_a_trusted_proxy_tells_the_client(trusted, peer, forwarded, client):
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["state"]["client"])
        await ok(scope, receive, send)

    asked = Client(app, policy(trusted_proxies=trusted))
    await asked.call(headers={"x-forwarded-for": forwarded}, client=(peer, 1))
    assert seen == [client]


# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_declared(declared):
    check_media_type(declared)


@pytest.mark.parametrize(
    "declared",
    ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/json"],
)
def test_other_bodies_are_not_read(declared):
    with pytest.raises(RequestError, match="send `Content-Type: application/json`"):
        check_media_type(declared)


@pytest.mark.parametrize("name", ["conversation", "tokenize", "max_length"])
def test_a_variable_that_no_template_can_have_is_refused_by_its_name(name):
    with pytest.raises(RequestError, match=f"chat_template_kwargs.{name} is not a variable"):
        check_template_kwargs({"chat_template_kwargs": {"enable_thinking": True, name: 1}})
    check_template_kwargs({"chat_template_kwargs": {"enable_thinking": True}})
    check_template_kwargs({"chat_template_kwargs": 5})  # vLLM says what is wrong


# --- the configuration ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cors_origins", "chat.example"),
        ("cors_origins", "https://chat.example/"),
        ("allowed_hosts", "https://chat.example"),
        ("allowed_hosts", "chat.example:8000"),
        ("trusted_proxies", "nginx"),
        ("trusted_proxies", "*"),
    ],
)
def test_a_wrong_entry_is_an_error_that_names_the_key(field, value):
    with pytest.raises((ConfigError, ValueError), match=f"http.{field}"):
        HttpArgs(**{field: [value]})
