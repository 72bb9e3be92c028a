"""Attention over K/V that stays in the server. Only `engine` and what it imports need MLX."""
