"""How many requests and body bytes one client may have in progress."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfg_core.errors import ConfigError, OverloadedError
from deployments.config.checks import check_message_sizes
from deployments.config.limits import LimitsArgs
from deployments.http.open_requests import OpenRequests


def counted(**fields):
    return OpenRequests(LimitsArgs(**fields))


def test_one_client_has_a_bound_and_others_are_admitted():
    here = counted(max_requests_per_client=2)
    open_requests = [here.begin("a"), here.begin("a")]
    with pytest.raises(OverloadedError, match="This client has 2 requests"):
        here.begin("a")
    here.begin("b")
    open_requests[0].end()
    here.begin("a")


def test_all_clients_together_have_a_bound():
    here = counted(max_requests=2)
    here.begin("a")
    request = here.begin("b")
    with pytest.raises(OverloadedError, match="has 2 requests in progress"):
        here.begin("c")
    request.end()
    request.end()
    here.begin("c")


def test_bytes_are_counted_until_the_request_ends():
    here = counted(max_body_bytes_at_once=15, max_body_bytes_per_client=10)
    first, second = here.begin("a"), here.begin("a")
    first.hold(6)
    with pytest.raises(OverloadedError, match="this client's requests have 6 bytes"):
        second.hold(5)
    other = here.begin("b")
    other.hold(9)
    with pytest.raises(OverloadedError, match="requests in progress have 15 bytes"):
        here.begin("c").hold(1)
    first.end()
    second.hold(5)
    here.check_integrity()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.booleans()), max_size=60))
def test_nothing_is_left_behind(visits):
    here, open_requests = (
        counted(max_requests=8, max_requests_per_client=4, max_body_bytes_at_once=50),
        [],
    )
    for client, num_bytes, ends in visits:
        try:
            open_requests.append(here.begin(client))
            open_requests[-1].hold(num_bytes)
        except OverloadedError:
            pass
        if ends and open_requests:
            open_requests.pop(0).end()
        here.check_integrity()
    for request in open_requests:
        request.end()
    here.check_integrity()
    assert here._num_requests == here._num_bytes == 0


GRPC = {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1"}


def test_an_application_whose_bodies_do_not_fit_a_message_does_not_start():
    check_message_sizes(8 * 2**20, 0, {})
    with pytest.raises(
        ConfigError, match=r"access\.max_body_bytes.*RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"
    ):
        check_message_sizes(8 * 2**20, 0, GRPC)
    enough = GRPC | {"RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**28)}
    check_message_sizes(8 * 2**20, 64 * 2**20, enough)
    with pytest.raises(ConfigError, match="max_answer_bytes"):
        check_message_sizes(8 * 2**20, 2**29, enough)
