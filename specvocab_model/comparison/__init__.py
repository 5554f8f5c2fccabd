"""Rival heads of one draft on the same prompts; the command is ``scripts/compare_heads.py``."""
