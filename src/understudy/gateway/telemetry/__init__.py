"""Telemetry of a gateway: metrics, calls as spans, and the agents' own telemetry labelled with their attempt."""

ATTEMPT_ID = "understudy.attempt.id"
"""The attribute that identifies the attempt, on our spans and on the resources of agents' exports."""
