"""One module for each log format but Claude Code's own; `registry` has the table and detects a file's format."""
