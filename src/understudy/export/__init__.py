"""What others learn from: one module a format, found through the entry points `understudy.exports`."""
