"""Removes secrets and personal names from text: rules, stable pseudonyms, and a report of what was
replaced where.
"""
