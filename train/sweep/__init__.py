"""Many training runs that differ in a few settings. ``scripts/sweep.py`` is the command."""
