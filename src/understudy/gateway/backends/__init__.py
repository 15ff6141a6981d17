"""Clients of model servers and providers, one module a kind."""
