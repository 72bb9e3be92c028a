"""What one does to a running server from a shell: one module a subcommand."""
