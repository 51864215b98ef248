"""Benchmarks. Each is a command, prints a table, and compares with a named opponent in the same run."""
