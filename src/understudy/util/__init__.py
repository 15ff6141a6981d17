"""Small helpers that know nothing of Understudy: files, locks, text, statistics, HTTP."""
