"""Telemetry of a gateway: metrics, calls as spans, and the agents' own telemetry marked with their attempt."""

ATTEMPT_ID = "understudy.attempt.id"
"""The attribute that names the attempt, on each span of ours and each resource of an agent's export."""
