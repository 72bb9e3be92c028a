"""One file a command family; `registry.command` is the only way in."""
