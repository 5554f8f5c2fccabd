"""Servers that the tests of the openai engine start: a small one around a real model, a proxy that spoils answers."""
