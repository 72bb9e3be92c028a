"""Hooks into other people's engines: mlx-lm attention, cache rebuild, hybrid routing."""
