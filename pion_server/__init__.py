"""pion-server: a small crash-safe server for the K/V and recurrent state of LLM prefixes."""

__version__ = "0.1.0"
