"""The HTTP server of the gateway: sockets, routes, one request, and the capture of its call."""
