"""An endpoint for OpenAI and Anthropic clients on top of mlx_lm.server, its memory in Pion."""
