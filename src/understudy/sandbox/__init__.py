"""Sandboxes, in which an agent works and the tests of its patch run. Their only way out is the gateway's
socket.
"""
