"""How the client reaches a server: one file a lane."""
