"""Reads the logs of many agents into training states: what the model saw before each turn, and what it did
next.
"""
