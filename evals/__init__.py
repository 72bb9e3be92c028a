"""Measurements of Pion through its public interfaces. Not part of the installed package."""
