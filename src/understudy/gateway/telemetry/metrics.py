"""Metrics of a gateway for Prometheus: its calls, their costs, and its current state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from understudy.gateway.control import GenerationControl
from understudy.types import Call

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
MODELS_LIMIT = 200
"""How many pairs of backend and model get metrics of their own, because servers may report any model name."""

_PREFIX = "understudy_gateway_"
_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_TOKENS = ("prompt", "cached", "cache_write", "completion")


class GatewayMetrics:
    """The metrics of one gateway in a registry of their own. `observe` observes its calls."""

    def __init__(self, control: GenerationControl) -> None:
        self._registry = CollectorRegistry()
        served = ["backend", "model"]
        self._calls = self._counter(
            "calls", "Calls that were kept, by how they ended.", "status", "dialect", *served
        )
        without_answer = "Calls without an answer of the model; BudgetExceeded is an attempt at its end."
        self._errors = self._counter("errors", without_answer, "boundary", "type")
        self._tokens = self._counter("tokens", "Tokens as the backends report them.", *served, "kind")
        self._cost = self._counter("cost_usd", "Cost of the calls whose price is known.", *served)
        self._seconds = Histogram(
            f"{_PREFIX}call_seconds",
            "From a request being understood to its answer being whole.",
            served,
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._models: set[tuple[str, str]] = set()
        self._registry.register(_ControlMetrics(control))

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, help_, labels, registry=self._registry)

    def observe(self, call: Call, _: Mapping[bytes, bytes]) -> None:
        """Count a stored call."""
        model = self._model(call.backend, call.backend_model)
        self._calls.labels(call.status, call.dialect, *model).inc()
        if call.error is not None:
            self._errors.labels(call.error.boundary, call.error.type).inc()
        for kind in _TOKENS:
            if (count := getattr(call.usage, f"{kind}_tokens")) > 0:
                self._tokens.labels(*model, kind).inc(count)
        if call.cost_usd is not None and call.cost_usd > 0:
            self._cost.labels(*model).inc(call.cost_usd)
        self._seconds.labels(*model).observe(call.ended_at - call.started_at)

    def _model(self, backend: str, name: str) -> tuple[str, str]:
        pair = backend, name
        if pair not in self._models:
            if len(self._models) >= MODELS_LIMIT:
                return backend, "other"
            self._models.add(pair)
        return pair

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _ControlMetrics(Collector):
    """What a gateway is doing, read when the metrics are requested."""

    def __init__(self, control: GenerationControl) -> None:
        self._control = control

    def collect(self) -> Iterable[Metric]:
        state = self._control.snapshot()
        for name, help_, value in (
            ("in_flight", "Generations that are running.", state.in_flight),
            ("held", "Requests that wait for the end of a pause.", state.waiting),
            ("paused", "1 while generation is paused.", state.paused),
        ):
            yield GaugeMetricFamily(_PREFIX + name, help_, value=value)
        policy_help = "1 for the policy version that generates now."
        policy = GaugeMetricFamily(f"{_PREFIX}policy", policy_help, labels=["version"])
        if self._control.version is not None:
            policy.add_metric([self._control.version], 1)
        yield policy


class _MergedMetrics(Collector):
    """Merges the samples of several processes; `texts` are their metrics by process name."""

    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for worker, text in self._texts.items():
            for family in text_string_to_metric_families(text.decode()):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.add_sample(sample.name, sample.labels | {"worker": worker}, sample.value)
        return families.values()


def merged(texts: Mapping[str, bytes]) -> bytes:
    """Merge the metrics of several processes, by name, into one text. Every sample gets a label `worker`."""
    return generate_latest(_MergedMetrics(texts))
