"""The evals: one module each, with `run(setting) -> Findings`.

The first line of a module's docstring is its title; the rest says what is measured, and how.
Modules whose name starts with ``_`` are not evals. The package is named for what comes out of it.
"""
