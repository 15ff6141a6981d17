"""Sandboxes on other machines, whose agents reach the gateway through the connection that started them."""
