"""The gateway: an agent's model requests in, committed answers out."""
