"""How many requests and body bytes one client may have in progress."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfg_core.errors import ConfigError, OverloadedError
from deployments.config.limits import LimitsArgs
from deployments.config.message_sizes import check_message_sizes
from deployments.http.crowd import Crowd


def crowd(**fields):
    return Crowd(LimitsArgs(**fields))


def test_one_client_has_a_bound_and_others_are_admitted():
    here = crowd(max_requests_per_client=2)
    stays = [here.stay("a"), here.stay("a")]
    with pytest.raises(OverloadedError, match="This client has 2 requests"):
        here.stay("a")
    here.stay("b")
    stays[0].end()
    here.stay("a")


def test_all_clients_together_have_a_bound():
    here = crowd(max_requests=2)
    here.stay("a")
    stay = here.stay("b")
    with pytest.raises(OverloadedError, match="has 2 requests in progress"):
        here.stay("c")
    stay.end()
    stay.end()
    here.stay("c")


def test_bytes_are_counted_until_the_request_ends():
    here = crowd(max_body_bytes_at_once=15, max_body_bytes_per_client=10)
    first, second = here.stay("a"), here.stay("a")
    first.hold(6)
    with pytest.raises(OverloadedError, match="this client's requests have 6 bytes"):
        second.hold(5)
    other = here.stay("b")
    other.hold(9)
    with pytest.raises(OverloadedError, match="requests in progress have 15 bytes"):
        here.stay("c").hold(1)
    first.end()
    second.hold(5)
    here.check_integrity()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.booleans()), max_size=60))
def test_nothing_is_left_behind(visits):
    here, stays = crowd(max_requests=8, max_requests_per_client=4, max_body_bytes_at_once=50), []
    for client, num_bytes, ends in visits:
        try:
            stays.append(here.stay(client))
            stays[-1].hold(num_bytes)
        except OverloadedError:
            pass
        if ends and stays:
            stays.pop(0).end()
        here.check_integrity()
    for stay in stays:
        stay.end()
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
