"""Sandboxes of this machine's own programs: bubblewrap, an overlay and control groups."""
