"""What a gateway tells others of its calls: metrics, spans, and the agents' own telemetry with their attempt."""

ATTEMPT_ID = "understudy.attempt.id"
"""The attribute that names the attempt, on each span of ours and each resource of an agent's export."""
