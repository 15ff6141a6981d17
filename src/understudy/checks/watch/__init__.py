"""Programs that run in tests' processes inside sandboxes, by the tasks' own Python; they import nothing of ours.

The directory is mounted into sandboxes (`runtime_events.WATCH_MOUNT`).
"""
