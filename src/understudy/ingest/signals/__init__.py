"""What became of each turn: failed calls, test results, edits that lasted, commits, and the user's reaction."""
