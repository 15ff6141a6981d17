"""Clients of model servers and providers, one module for each kind."""
