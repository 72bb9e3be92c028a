"""Speed and memory benchmarks: one module each, with a ``run()`` that returns what it measured.

A module's docstring says the expected result; ``run() -> Mapping`` takes no arguments, prints its
own table and returns JSON-able figures. Modules whose name starts with ``_`` are not benchmarks.
"""
