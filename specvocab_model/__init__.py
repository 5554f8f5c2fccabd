"""Draft models with a speculated vocabulary: architecture, objective, decoding, export."""
