"""The export formats, one module a consumer; `understudy.exports` entry points in pyproject.toml name them."""
