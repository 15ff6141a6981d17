"""The status of runs and workers as metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from understudy.report.status import StoreStatus

_PREFIX = "understudy_"


def status_metrics(status: StoreStatus) -> bytes:
    """Return a status in Prometheus's text format, as node_exporter's textfile collector reads it.

    All metrics are gauges with the label `run` or `worker`, because they are read from the store, which has no
    counters. The quantiles of a phase are over all ended attempts of the run.
    """
    registry = CollectorRegistry()
    registry.register(_StatusMetrics(status))
    return generate_latest(registry)


class _StatusMetrics(Collector):
    def __init__(self, status: StoreStatus) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        runs = [(run_status.queue.run_id, run_status) for run_status in self._status.runs]
        workers = self._status.workers
        yield _gauge(
            "rollouts",
            "Rollouts by state; those that are preparing or running have a sandbox, or one that opens.",
            ("run", "status"),
            {(run, name): count for run, run_status in runs for name, count in run_status.queue.rollouts.items()},
        )
        yield _gauge(
            "queue_oldest_seconds",
            "For how long the oldest queued rollout has waited.",
            ("run",),
            {
                (run,): run_status.queue.oldest_s
                for run, run_status in runs
                if run_status.queue.oldest_s is not None
            },
        )
        yield _gauge(
            "infrastructure_failures",
            "Attempts that a fault of the infrastructure ended, by the boundary that it crossed.",
            ("run", "boundary"),
            {(run, name): count for run, run_status in runs for name, count in run_status.faults.items()},
        )
        yield _gauge(
            "rollouts_given_up",
            "Rollouts that failed for good because of such faults.",
            ("run",),
            {(run,): run_status.given_up for run, run_status in runs},
        )
        phases = {(run, name): phase for run, run_status in runs for name, phase in run_status.phases.items()}
        yield _gauge(
            "phase_seconds",
            "How long a phase of ended attempts took.",
            ("run", "phase", "quantile"),
            {
                (*key, quantile): value
                for key, phase in phases.items()
                for quantile, value in (("0.5", phase.p50_s), ("0.99", phase.p99_s))
            },
        )
        yield _gauge(
            "phase_attempts",
            "Of how many attempts these are.",
            ("run", "phase"),
            {key: phase.attempts for key, phase in phases.items()},
        )
        for name, help_, values in (
            (
                "up",
                "1 while the leases of a worker have not ended.",
                {worker.id: worker.alive for worker in workers},
            ),
            (
                "capacity",
                "Attempts that a worker takes at a time.",
                {worker.id: worker.capacity for worker in workers},
            ),
            ("leases", "Attempts that a worker holds.", {worker.id: worker.held for worker in workers}),
            (
                "silent_seconds",
                "Since a worker renewed its leases.",
                {worker.id: worker.silent_s for worker in workers},
            ),
        ):
            yield _gauge(f"worker_{name}", help_, ("worker",), {(key,): value for key, value in values.items()})
        yield _gauge(
            "worker_leaves_run",
            "1 for a run that a worker claims nothing of now: failures in a row, or it cannot execute it.",
            ("worker", "run"),
            {(worker.id, run): 1 for worker in workers for run in worker.leaves},
        )


def _gauge(
    name: str, help_: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(_PREFIX + name, help_, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
