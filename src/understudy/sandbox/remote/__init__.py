"""Sandboxes on other machines. Their agents reach the gateway through the connection that started them."""
