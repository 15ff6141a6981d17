"""Small general helpers: files, locks, text, statistics, HTTP. They depend on nothing else in Understudy but
errors.
"""
