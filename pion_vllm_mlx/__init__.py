"""Pion: memory for LLMs."""
