"""The service's metrics, for Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """Metrics of one service.

    Attributes:
        requests: answers by path and status.
        request_seconds: time from a request to the end of its answer.
        first_token_seconds: time from a request to its first tokens.
        tokens: tokens generated and delivered.
    """

    def __init__(self):
        """Starts all counters at zero."""
        # A registry per service: the global one of the library would mix several in one process.
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("flash_lm_requests", "Answers", ["path", "status"], registry=registry)
        self.request_seconds = Histogram(
            "flash_lm_request_seconds", "Time to the end of an answer", buckets=_SECONDS, registry=registry
        )
        self.first_token_seconds = Histogram(
            "flash_lm_first_token_seconds", "Time to the first tokens", buckets=_SECONDS, registry=registry
        )
        self.tokens = Counter("flash_lm_tokens", "Tokens generated", registry=registry)

    def watch(self, name: str, what: str, value: Callable[[], float]) -> None:
        """Adds a gauge that calls `value` when it is read."""
        Gauge(f"flash_lm_{name}", what, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)
