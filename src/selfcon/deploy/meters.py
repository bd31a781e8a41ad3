"""What a service counts, for Prometheus. Needs the extra `serve`."""

from __future__ import annotations

import prometheus_client as prometheus
from fastapi.responses import Response


class Meters:
    """What /metrics tells."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        prefix = "selfcon_"
        self.requests = prometheus.Counter(
            f"{prefix}requests", "Requests by path and status", ["path", "status"], registry=self.registry
        )
        self.seconds = prometheus.Histogram(
            f"{prefix}request_seconds",
            "Time to answer a request",
            ["path"],
            registry=self.registry,
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
        )
        self.batches = prometheus.Histogram(
            f"{prefix}batch_images", "Images in a batch", registry=self.registry, buckets=(1, 2, 4, 8, 16, 32, 64)
        )
        self.answers = prometheus.Counter(
            f"{prefix}answers", "Images by the answer that was given", ["answer"], registry=self.registry
        )

    def as_response(self) -> Response:
        """All of it in Prometheus' format."""
        return Response(prometheus.generate_latest(self.registry), media_type=prometheus.CONTENT_TYPE_LATEST)
