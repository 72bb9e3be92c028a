"""What is kept, and how it survives: record log, sessions, manifests, recurrent state."""
