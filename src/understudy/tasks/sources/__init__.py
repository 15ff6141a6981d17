"""Where a task's files come from: pinned archives, directories, task folders and their Dockerfiles."""
