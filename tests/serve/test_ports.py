"""What a stranger finds who reaches every port of the machine: no port may run what it is sent."""

from __future__ import annotations

import pickle
from pathlib import Path

import grpc
import psutil
import pytest
from ray.serve.generated import serve_pb2
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

pytestmark = pytest.mark.slow


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def listening(server, name: str = "") -> list[tuple[str, int]]:
    """(address, port) of the sockets of all its processes whose command line has `name`."""
    return [
        (connection.laddr.ip, connection.laddr.port)
        for process in server.processes()
        if name in " ".join(process.cmdline())
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def status_of_call(port: int, payload: bytes) -> grpc.StatusCode:
    """What a replica's gRPC port answers to a call without a token."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = serve_pb2.ASGIRequest(
            pickled_request_metadata=payload, request_args=payload, request_kwargs=payload
        )
        try:
            list(ASGIServiceStub(channel).HandleRequestStreaming(request, timeout=5))
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.fixture
def own_server(server):
    if not hasattr(server, "processes"):
        pytest.skip("CFG_SERVE_URL: the server's processes are not known")
    return server


def test_replicas_run_nothing_that_strangers_send(own_server, tmp_path):
    """Serve opens a port on every address for each replica, and unpickles what comes: with a token
    only."""
    bomb = tmp_path / "went-off"
    ports = {port for _, port in listening(own_server, "ServeReplica")}
    answers = [status_of_call(port, pickle.dumps(Bomb(bomb))) for port in ports]
    assert answers.count(grpc.StatusCode.UNAUTHENTICATED) >= 3, (
        answers
    )  # of the ingress, the generator, the encoder
    assert not bomb.exists()


def test_http_is_where_it_was_told_to_be(own_server):
    port = int(own_server.url.rpartition(":")[2])
    assert {address for address, other in listening(own_server) if other == port} == {"127.0.0.1"}
