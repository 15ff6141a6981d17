"""What became of each turn: failed calls, tests, edits that lasted, commits, and what the user said of it."""
