"""Benchmarks that come with the package: rivals measured side by side in one run, a table, and a JSON file.

`python -m linattn.bench` measures the operator on this machine; `--help` says what can be chosen.
"""
