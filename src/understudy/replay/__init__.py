"""Asking teachers what they would have done at a state, through the gateway, within a cost budget."""
