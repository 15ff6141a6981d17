"""The export formats, one module per consumer.

The entry points `understudy.exports` in pyproject.toml name them.
"""
