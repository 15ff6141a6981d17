"""Shows what Understudy stores on disk and in databases, and removes what is not needed: `understudy du` and
`prune`.
"""
