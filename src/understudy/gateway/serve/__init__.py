"""The gateway as a service: keys in the store, worker processes, and the supervisor that keeps them running."""
