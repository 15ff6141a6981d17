"""Publishes new weights to the server that samples, under a version, through the server's own control
endpoints.
"""
