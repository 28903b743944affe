"""The command line: `linattn train`, `generate`, `complete`, `transcribe`, `eval`, `info`, `pack`, `bench` and more."""
