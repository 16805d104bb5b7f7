"""Prometheus metrics of one hub process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mergetta.hub.builder import Builder


class Metrics:
    """Each process counts for itself: with several workers behind one port, a scrape sees one of them."""

    def __init__(self, builder: Builder) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "mergetta_requests", "Requests answered", ("method", "route", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "mergetta_request_seconds",
            "Time to answer",
            ("route",),
            registry=self.registry,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
        )
        for name, text, value in (
            ("mergetta_builds", "Bundles built by this process", lambda: builder.builds),
            ("mergetta_build_failures", "Builds that failed and were tried again", lambda: builder.failures),
            ("mergetta_build_seconds", "Duration of the last build", lambda: builder.seconds),
            ("mergetta_pool_bytes", "Memory of the scatter matrices", lambda: builder.memory),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        self.requests.labels(method, route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
