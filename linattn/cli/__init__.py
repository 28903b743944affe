"""The command line: `linattn train`, `generate`, `complete`, `eval`, `info`, `bench`."""
