"""What a stranger finds who reaches every port of the machine: no port may run what it is sent."""

from __future__ import annotations

import pickle
import socket
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


def ports_of_replicas(server) -> set[int]:
    replicas = [process for process in server.processes() if "ServeReplica" in " ".join(process.cmdline())]
    return {
        connection.laddr.port
        for process in replicas
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def status_of_call(port: int, payload: bytes) -> grpc.StatusCode:
    """What a replica's gRPC port answers to a call without a token."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = serve_pb2.ASGIRequest(pickled_request_metadata=payload, request_args=payload, request_kwargs=payload)
        try:
            list(ASGIServiceStub(channel).HandleRequestStreaming(request, timeout=5))
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_replicas_run_nothing_that_strangers_send(server, tmp_path):
    """Serve opens a port on every address for each replica, and unpickles what comes: with a token only."""
    if not hasattr(server, "processes"):
        pytest.skip("CFG_SERVE_URL: the server's processes are not known")
    bomb = tmp_path / "went-off"
    answers = [status_of_call(port, pickle.dumps(Bomb(bomb))) for port in ports_of_replicas(server)]
    assert answers.count(grpc.StatusCode.UNAUTHENTICATED) >= 3, answers  # of the ingress, the generator, the encoder
    assert not bomb.exists()


def test_http_is_where_it_was_told_to_be(server):
    """127.0.0.1, not every address."""
    port = int(server.url.rpartition(":")[2])
    others = {a[4][0] for a in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in others:
        with socket.socket() as probe:
            probe.settimeout(2)
            assert probe.connect_ex((address, port)) != 0, address
