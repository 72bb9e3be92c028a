"""Several server processes on one port (`-w N`): the parent, its workers, and who holds what."""
