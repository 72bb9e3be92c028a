"""Bytes in, requests out, replies back: RESP and the binary lane."""
