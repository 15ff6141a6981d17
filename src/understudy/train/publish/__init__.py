"""Weights become what a server samples from, under a version: through the server's own control endpoints."""
