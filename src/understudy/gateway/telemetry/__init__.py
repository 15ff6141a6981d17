"""What is told of the calls: metrics for Prometheus, spans for OpenTelemetry, the telemetry of the agents."""
