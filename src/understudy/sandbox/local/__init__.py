"""Sandboxes that use this machine's own programs: bubblewrap, overlayfs and control groups."""
