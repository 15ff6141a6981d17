"""The HTTP server of the gateway: sockets, routes, requests, and the capture of calls."""
