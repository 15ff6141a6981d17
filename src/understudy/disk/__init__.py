"""What Understudy has on disk and in databases, and what of it can go: `understudy du` and `prune`."""
