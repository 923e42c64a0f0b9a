"""/metrics, without a server."""

from deployments.ingress.metrics import Metrics


def lines(metrics):
    return [line for line in metrics.text().decode().splitlines() if not line.startswith("#")]


def test_requests_are_counted_by_path_status_and_tenant():
    metrics = Metrics("i1", ["/v1/completions"], dict)
    metrics.answered("/v1/completions", 200, "a", 0.02, 1.5)
    metrics.answered("/v1/completions", 200, "a", 0.03, 1.5)
    metrics.answered("/v1/completions", 429, None, 0.001, 0.001)
    metrics.answered("/v1/completions", None, "a", None, 3.0)
    told = lines(metrics)
    assert (
        'cfg_serve_requests_total{ingress="i1",path="/v1/completions",status="200",tenant="a"} 2.0'
        in told
    )
    assert (
        'cfg_serve_requests_total{ingress="i1",path="/v1/completions",status="429",tenant="-"} 1.0'
        in told
    )
    assert (
        'cfg_serve_requests_total{ingress="i1",path="/v1/completions",status="left",tenant="a"} 1.0'
        in told
    )
    assert 'cfg_serve_first_byte_seconds_count{ingress="i1",path="/v1/completions"} 3.0' in told
    assert (
        'cfg_serve_request_seconds_bucket{ingress="i1",le="2.5",path="/v1/completions"} 3.0' in told
    )


def test_unknown_paths_share_one_label():
    metrics = Metrics("i1", ["/v1/completions"], dict)
    for i in range(100):
        metrics.answered(f"/{i}", 404, "a", 0.0, 0.0)
    assert (
        'cfg_serve_requests_total{ingress="i1",path="other",status="404",tenant="a"} 100.0'
        in lines(metrics)
    )


def test_gauges_are_read_when_scraped():
    values = {"kv_blocks_free": 3.0}
    metrics = Metrics("i1", [], lambda: values)
    values["kv_blocks_free"] = 5
    assert 'cfg_serve_kv_blocks_free{ingress="i1"} 5.0' in lines(metrics)
