"""The ports that the server opens: none of them may run code that an unknown client sends."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import grpc
import psutil
import pytest
from ray.serve.generated import serve_pb2
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

from tools.serving.process import ServeProcess

pytestmark = pytest.mark.slow


class Bomb:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


def listening(server: ServeProcess, name: str = "") -> list[tuple[str, int]]:
    """Return the listening addresses and ports of the processes whose command line has `name`."""
    return [
        (connection.laddr.ip, connection.laddr.port)
        for process in server.processes()
        if name in " ".join(process.cmdline())
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def status_of_call(port: int, payload: bytes) -> grpc.StatusCode:
    """Call a replica's gRPC port without a token. Return the status."""
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
def own_server(server: ServeProcess) -> ServeProcess:
    if not hasattr(server, "processes"):
        pytest.skip("CFG_SERVE_URL: the server's processes are not known")
    return server


def test_replicas_run_nothing_that_strangers_send(own_server: ServeProcess, tmp_path: Path) -> None:
    """A replica refuses calls without a token.

    Serve opens a port on all addresses for each replica, and unpickles what it receives there.
    """
    bomb = tmp_path / "went-off"
    ports = {port for _, port in listening(own_server, "ServeReplica")}
    answers = [status_of_call(port, pickle.dumps(Bomb(bomb))) for port in ports]
    # Ports of the ingress, the generator and the encoder.
    assert answers.count(grpc.StatusCode.UNAUTHENTICATED) >= 3, answers
    assert not bomb.exists()


def test_http_is_where_it_was_told_to_be(own_server: ServeProcess) -> None:
    port = int(own_server.url.rpartition(":")[2])
    assert {address for address, other in listening(own_server) if other == port} == {"127.0.0.1"}
