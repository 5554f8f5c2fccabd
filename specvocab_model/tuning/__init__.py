"""Choosing a head for a draft, a text and a device; the command is ``scripts/tune_head.py``."""
